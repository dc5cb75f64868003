"""What a run tells: metrics while it trains, loggers, and at its end a report with a verdict on its speed."""
