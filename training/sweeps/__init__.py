"""The report of a sweep: a table and a picture that compare its settings."""
