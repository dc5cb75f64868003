"""Parts that are dropped in: nothing outside of this folder imports it, so each folder in it can be deleted."""
