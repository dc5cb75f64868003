"""Networks: each takes float images (B, C, H, W) and returns logits (B, num_classes).

A class or function that makes one takes num_classes and in_channels, image_size if it wants to know it, and the keys of
its yaml file in conf/model/. If it has an attribute `preprocessing`, that tells which images the network expects:
models/from_timm.py.
"""
