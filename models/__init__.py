"""Networks, which take float images (B, C, H, W) and return logits (B, num_classes).

A network is made by a class or function that takes the keys of its yaml file in conf/model/, and gets num_classes,
in_channels and image_size if it has such parameters. A function may have an attribute `preprocessing`, a function that
says which images the network expects, as in extras/pretrained/from_timm.py.
"""
