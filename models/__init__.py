"""Networks, which take float images (B, C, H, W) and return logits (B, num_classes).

A network is made by a class or function that takes num_classes and in_channels, image_size if it has that parameter,
and the keys of its yaml file in conf/model/. It may have an attribute `preprocessing`, a function that says which
images the network expects, as in extras/pretrained/from_timm.py.
"""
