"""Who does the tasks: worker processes (`process`), threads (`thread`), or the caller (`inline`)."""
