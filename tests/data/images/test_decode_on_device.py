"""data/images/decode_on_device.py, with a CPU's decoder in the place of the GPU's: it makes the pixels of workers."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import write_images, write_pack
from omegaconf import DictConfig, OmegaConf
from PIL import ExifTags, Image

import train
from data.errors import DataError
from data.image_folder import ImageFolder
from data.images import decode_on_device
from data.images.crops import resize, resized_as_floats
from data.images.decode_on_device import DecodeOnDevice, EncodedImages
from data.images.decoders import upright
from data.subset import Subset
from loaders import Preloader, WorkerLoader
from tests.configs import NO_TRIALS, composed
from training.config import checked
from training.datasets import Datasets

CROPS = {"image_size": 20, "interpolation": "bicubic"}
UNREADABLE = "progressive"  # what the device's decoder in these tests cannot read


class CpuDecoder:
    """Decodes with Pillow, then turns what it has read, and knows how many files it was given."""

    def __init__(self) -> None:
        self.files = 0

    def __call__(self, files: list[torch.Tensor], orientations: list[int], device: torch.device) -> list[torch.Tensor]:
        assert not any(file.is_cuda for file in files) and device.type == "cpu"
        if any(b"\xff\xc2" in file.numpy().tobytes() for file in files):
            raise RuntimeError(f"this decoder reads no {UNREADABLE} JPEGs")
        self.files += len(files)
        images = [np.asarray(Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB")).copy() for file in files]
        pixels = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
        return [upright(image, turn) for image, turn in zip(pixels, orientations, strict=True)]


def identity(batch, random=None):
    return batch


@pytest.fixture
def images(tmp_path) -> Path:
    """Six training and six test images of one class, five of them of different kinds, and one of another class."""
    root = write_images(tmp_path / "images", ("cat", "dog"), count=1)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    kinds = {"baseline.jpg": {}, "turned.jpg": {"exif": turned.tobytes()}, "progressive.jpg": {"progressive": True}}
    kinds |= {"cmyk.jpg": {}, "other.png": {}}
    for split in ("train", "val"):
        for number, (name, options) in enumerate(kinds.items()):
            noise = np.random.default_rng(number).integers(256, size=(50 + number, 70, 3), dtype=np.uint8)
            image = Image.fromarray(noise).convert("CMYK" if name == "cmyk.jpg" else "RGB")
            image.save(root / split / "cat" / name, **options)
    return root


def batches(dataset, decode=None, num_workers=1, epochs=1, **options):
    """The batches of `dataset`, shuffled; `decode` is what decodes on the device."""
    transform = None if decode is None else DecodeOnDevice(getattr(dataset, "dataset", dataset), identity, decode)
    loader = WorkerLoader(dataset, 4, shuffle=True, num_workers=num_workers, seed=3, **options)
    with Preloader(loader, "cpu", transform=transform) as preloader:
        return [batch for _ in range(epochs) for batch in preloader]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our["label"], their["label"]) and torch.equal(our["image"], their["image"])


@pytest.mark.parametrize(("train", "worker_method"), [(True, "multiprocessing"), (False, "thread")])
def test_order_and_pixels_are_those_of_decoding_in_workers(images, train, worker_method, monkeypatch):
    monkeypatch.setattr(decode_on_device, "GROUP", 3)
    crops = {**CROPS, "policy": "trivial"}
    expected = batches(ImageFolder(train, images, **crops), epochs=2)
    decoder = CpuDecoder()
    dataset = ImageFolder(train, images, decode_on="device", **crops)
    assert_equal(batches(dataset, decoder, epochs=2, worker_method=worker_method), expected)
    assert decoder.files == 2 * 4  # in each epoch; not the progressive one, the PNG, and the one in CMYK


def test_part_of_the_training_set_is_decoded_on_the_device_too(images):
    expected, ours = (ImageFolder(True, images, decode_on=place, **CROPS) for place in ("workers", "device"))
    expected, ours = expected.without_augmentation(), ours.without_augmentation()
    decoder, rows = CpuDecoder(), np.array([0, 2, 3, 5])
    assert_equal(batches(Subset(ours, rows), decoder), batches(Subset(expected, rows)))
    assert decoder.files == 2


def test_files_in_a_pack_are_left_encoded_too_and_pixels_are_refused(tmp_path, images):
    Packed = pytest.importorskip("data.packed", reason="a fork may have deleted it").Packed
    pack = write_pack(tmp_path, "--format", "jpeg")
    expected, ours = (Packed(True, pack, decode_on=place, **CROPS) for place in ("workers", "device"))
    assert_equal(batches(ours, decoder := CpuDecoder(), num_workers=0), batches(expected, num_workers=0))
    assert decoder.files == 4
    shutil.rmtree(pack)
    with pytest.raises(DataError, match=r"data.decode_on=device: .*pack has pixels, which need no decoding; use data"):
        Packed(True, write_pack(tmp_path), decode_on="device")
    with pytest.raises(DataError, match=r"data.decode_on=gpu: .*it is one of workers, device"):
        Packed(True, pack, decode_on="gpu")


def test_encoded_images_stay_on_the_host_and_are_not_pickled(images):
    dataset = ImageFolder(True, images, decode_on="device", **CROPS)
    with WorkerLoader(dataset, len(dataset), num_workers=1, seed=0) as loader:
        (batch,) = loader
        assert loader.stats()["workers"]["pickled_batches"] == 0
    encoded = batch["image"]
    assert isinstance(encoded, EncodedImages) and encoded.to("cuda", non_blocking=True) is encoded
    assert len(encoded) == len(dataset) and sum(encoded.sizes) == len(encoded.data)
    assert encoded.data[: encoded.sizes[0]].numpy().tobytes() == Path(dataset.path(0)).read_bytes()


def test_a_damaged_file_is_named_and_one_that_is_missing_can_be_skipped(images):
    dataset = ImageFolder(True, images, decode_on="device", **CROPS)
    expected = batches(ImageFolder(True, images, **CROPS))
    Path(dataset.path(0)).unlink()
    with WorkerLoader(range(len(dataset)), 4, shuffle=True, seed=3) as loader:
        for batch, indices in zip(expected, loader, strict=True):
            batch.update({name: values[indices != 0] for name, values in batch.items()})
    assert_equal(batches(dataset, CpuDecoder(), on_error="skip"), expected)
    damaged = Path(dataset.path(1))
    damaged.write_bytes(damaged.read_bytes()[:-200])
    sentence = r"baseline.jpg cannot be read as an image \(.*truncated.*replace or remove it"
    with pytest.raises(DataError, match=sentence):
        batches(Subset(dataset, np.array([0, 1, 2])), CpuDecoder(), on_error="skip")


def test_a_device_without_memory_or_without_a_decoder_ends_in_an_error(images, monkeypatch):
    def full(files, orientations, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):  # it is not taken for files that the device cannot read
        batches(ImageFolder(True, images, decode_on="device", **CROPS), full, num_workers=0)
    for name in ("with_torchcodec", "with_torchvision"):
        monkeypatch.setattr(decode_on_device, name, lambda *_: [][0])
    with pytest.raises(DataError, match=r"no decoder works on this GPU \(.*: list index out of range; .*pip install"):
        decode_on_device.decoder_of_gpu()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_floats_are_resized_as_bytes_are_but_for_two_levels(interpolation):
    for size in ((200, 300), (9, 40)):
        pixels = torch.randint(256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected = torch.empty((1, 64, 64, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        resize(pixels, expected, interpolation)
        difference = (resized_as_floats(pixels[None], (64, 64), interpolation) - expected.float()).abs()
        assert difference.max() <= 2 and difference.mean() < 0.05


# In a run


def config_of(images: Path, *overrides: str) -> DictConfig:
    small = ["model=linear", "train.batch_size=4", "train.epochs=2", *NO_TRIALS, "augment.mixup=0.2"]
    folder = ["data=image_folder", f"data.root={images}", "data.image_size=8", "data.val_fraction=0.2"]
    return composed(*small, *folder, *overrides)


def test_a_run_that_decodes_on_the_device_learns_the_same(images, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFolder, "check_run", lambda section, device, loader: None)
    decoder = CpuDecoder()
    monkeypatch.setattr(decode_on_device, "decoder_of_gpu", lambda: decoder)
    runs = [
        train.run(config_of(images, f"data.decode_on={place}", "loader.num_workers=0"), tmp_path / place)
        for place in ("workers", "device")
    ]
    assert decoder.files > 0
    for key in ("val_loss", "test_loss"):
        assert runs[0][key] == runs[1][key]


def test_a_finished_run_that_decoded_on_a_device_is_evaluated_without_one(tmp_path):
    finished_run = pytest.importorskip("training.finished.finished_run", reason="a fork may have deleted it")
    settings = OmegaConf.to_container(config_of(tmp_path, "data.decode_on=device"))
    assert finished_run.configure({"data": settings["data"]}, ["device=cpu"]).data["decode_on"] == "workers"


@pytest.mark.parametrize(
    ("override", "has_gpu", "sentence"),
    [
        ("device=auto", False, "data.decode_on=device needs a GPU, but this run uses the CPU: use data.decode_on=w"),
        ("device=cpu", True, "data.decode_on=device needs a GPU"),
        ("loader=resident", True, "data.decode_on=device: loader=resident needs decoded images: use loader=prefetch"),
        ("loader=torch", True, "loader=torch needs decoded images"),
    ],
)
def test_a_run_that_cannot_decode_on_a_device_ends_in_a_sentence(tmp_path, monkeypatch, override, has_gpu, sentence):
    config = checked(config_of(tmp_path, "data.decode_on=device", override))
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    with pytest.raises(DataError, match=sentence):
        Datasets(config)
