"""What a trained network is used for: evaluation, prediction and export, as scripts/ does them."""
