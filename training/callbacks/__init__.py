"""What a run writes: metrics while it trains, also to loggers; at its end a report, with a verdict on its speed."""
