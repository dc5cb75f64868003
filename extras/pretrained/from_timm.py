"""Any network of the package timm, randomly initialised or pretrained: model=timm."""

from typing import Any

from torch import nn

from extras.pretrained.pretrained import Preprocessing, downloading

OLDEST = (1, 0, 26)  # the first version that loads every file with weights_only=True
WITHOUT_NETWORK = (
    "copy ~/.cache/huggingface from a machine that has it, give a folder as model.name=local-dir:FOLDER, "
    "or set model.pretrained=false"
)


def from_timm(
    name: str, pretrained: bool, num_classes: int, in_channels: int, image_size: int = 224, **options: Any
) -> nn.Module:
    """A network that takes float images (B, in_channels, H, W) and returns logits (B, num_classes).

    name: one of timm.list_models(), with or without the tag of its weights, such as resnet50.a1_in1k; or
        hf-hub:OWNER/NAME; or local-dir:FOLDER, which has a config.json and the weights (timm.models.save_for_hf).
    pretrained: loads all weights. The last layer is new, unless the weights have the same number of classes. For
        images without three channels, timm sums or repeats the weights of the first layer.
    image_size: for networks that need it. Most transformers resize their position embedding to it.
    options: further arguments of timm.create_model, such as drop_path_rate.
    Raises ValueError for an unknown name, for weights that cannot be downloaded, and if timm is missing or too old.
    """
    if settings(name).get("fixed_input_size"):
        options = {"img_size": image_size, **options}
    with downloading(name, WITHOUT_NETWORK):
        return package().create_model(name, pretrained, num_classes=num_classes, in_chans=in_channels, **options)


def preprocessing(name: str, pretrained: bool, **options: Any) -> Preprocessing:
    """How the network expects its images: for a network without pretrained weights, only their size."""
    theirs = package().data.resolve_data_config(pretrained_cfg=settings(name))
    size = options.get("img_size") or theirs["input_size"][-1]
    if not pretrained:
        return Preprocessing(size)
    interpolation = "bilinear" if theirs["interpolation"] == "bilinear" else "bicubic"
    return Preprocessing(size, interpolation, theirs["crop_pct"], tuple(theirs["mean"]), tuple(theirs["std"]))


from_timm.preprocessing = preprocessing  # type: ignore[attr-defined]  # training/preprocessing.py looks for it


def settings(name: str) -> dict[str, Any]:
    """What timm knows about a network and its weights, without building it. Raises ValueError as `from_timm` does."""
    timm = package()
    source, _, place = name.partition(":")
    with downloading(name, WITHOUT_NETWORK):
        if source == "hf-hub":
            return timm.models.load_model_config_from_hf(place)[0]
        if source == "local-dir":
            return timm.models._hub.load_model_config_from_path(place)[0]
    if name not in (timm.list_pretrained() if "." in name else timm.list_models()):
        raise ValueError(f"there is no network {name!r}: timm.list_models() names them all")
    return timm.models.resolve_pretrained_cfg(name).to_dict()


def package() -> Any:
    """The package timm. Raises ValueError if it is not installed or too old."""
    try:
        import timm
    except ModuleNotFoundError as error:
        raise ValueError(f"model=timm needs {error.name}, which is not installed: pip install timm") from error
    if tuple(int(part) for part in timm.__version__.split(".")[:3]) < OLDEST:
        raise ValueError(f"timm {timm.__version__} could execute code in a file of weights: pip install -U timm")
    return timm
