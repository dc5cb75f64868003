"""Who does the tasks: worker processes (`process`)."""
