"""Loggers, which `logger=` chooses. Each file here and its yaml in conf/logger/ can be deleted by itself."""
