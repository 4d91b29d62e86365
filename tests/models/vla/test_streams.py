"""Images of any size reach Deft's own models."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft.errors import InputError
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.spec import model_defaults
from deft.models.vla.streams import square_images
from deft.models.vla.tiny import TinyVLAModel


def test_images_are_squashed_by_area_averaging():
    images = torch.zeros(1, 3, 2, 4, dtype=torch.uint8)
    images[0, :, 0] = torch.tensor([10, 20, 100, 201], dtype=torch.uint8)
    # 1×1: (10 + 20 + 100 + 201 + 4 · 0) / 8 = 41.4. 2×2: columns by twos, rows as they are.
    assert square_images(images, 1, "rgb").flatten().tolist() == [41, 41, 41]
    assert square_images(images, 2, "rgb")[0, 0].tolist() == [[15, 150], [0, 0]]  # 150.5 rounds to even
    assert square_images(images[..., :2], 2, "rgb").data_ptr() == images.data_ptr()  # of the right size: as they are


def test_the_datasets_option_and_the_model_scale_alike():
    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (256, 512, 3), np.uint8)
    read = np.asarray(Image.fromarray(image).resize((64, 64), Image.Resampling.BOX)).astype(int)  # as LeRobot's loader
    seen = square_images(torch.from_numpy(image).permute(2, 0, 1)[None], 64, "rgb")[0].permute(1, 2, 0).numpy()
    assert np.abs(read - seen).max() <= 1  # PIL rounds after each axis


@pytest.mark.parametrize("model_class", [TinyVLAModel, GPTVLAModel])
def test_a_model_of_64_pixels_reads_a_video_of_480_by_640(model_class):
    camera = spaces.Box(0, 255, (3, 480, 640), np.uint8)
    observation = spaces.Dict({"top": camera, "state": spaces.Box(-1, 1, (4,), np.float32)})
    keywords = model_defaults(model_class, {}, observation, spaces.Box(-1, 1, (2,), np.float32))
    model = model_class(**keywords)
    assert model.image_size == 64
    td = TensorDict(
        {"top": torch.randint(0, 256, (2, 3, 480, 640), dtype=torch.uint8), "state": torch.zeros(2, 4)}, [2]
    )
    assert model(td).shape == (2, 2)


def test_the_size_of_the_images_is_a_multiple_that_the_model_can_have():
    camera = spaces.Box(0, 255, (3, 84, 84), np.uint8)
    space = spaces.Dict({"top": camera})
    assert model_defaults(TinyVLAModel, {}, space, spaces.Box(-1, 1, (2,), np.float32))["image_size"] == 80


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 16, 16, 4, dtype=torch.uint8), torch.zeros(2, 3, 16, 16), torch.zeros(2, 16, 16)]
)
def test_what_is_no_image_is_named(images):
    with pytest.raises(InputError, match=r"observation 'rgb' is .* images are uint8 \[B, 3, h, w\]"):
        square_images(images, 16, "rgb")
