"""Networks: each here takes float images (B, C, H, W) and returns logits (B, num_classes).

A class or function that makes one takes num_classes and in_channels, image_size if it asks for it, and the keys of its
yaml file in conf/model/. An attribute `preprocessing`, as in models/from_timm.py, tells which images it expects.
"""
