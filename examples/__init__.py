"""Forks of this repository that add files and change none. Each folder has its own conf/: --config-dir adds it.

python train.py --config-dir examples/segmentation/conf experiment=segmentation
"""
