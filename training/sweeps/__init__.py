"""What a sweep tells: a table and a picture over the runs of all its settings."""
