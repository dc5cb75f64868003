"""Forks of this repository that add files and change none. Each has its own conf/, which --config-dir adds.

python train.py --config-dir examples/segmentation/conf experiment=segmentation    # U-Net, joint augmentation, mIoU
python train.py --config-dir examples/simclr/conf experiment=simclr                # two views, no labels
python train.py --config-dir examples/simclr/conf experiment=moco                  # a slow copy and a queue: own step
python train.py --config-dir examples/text/conf experiment=text                    # padding, batches of similar length
python train.py --config-dir examples/text/conf experiment=lines data.root=DIR  # a stream of JSONL shards
python train.py --config-dir examples/training_steps/conf experiment=distillation  # a frozen teacher
python train.py --config-dir examples/training_steps/conf experiment=gan           # two optimizers

`python scripts/predict.py RUN` writes a mask for each image of a segmentation run.
"""
