"""Networks: each takes float images (B, C, H, W) and returns logits (B, num_classes)."""
