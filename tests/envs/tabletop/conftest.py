"""What the tabletop's tests share."""

import pytest

from deft.envs.tabletop.rendering import renderer
from deft.errors import InputError


@pytest.fixture(scope="session")
def gl() -> None:
    """Skips where nothing can be rendered."""
    try:
        renderer()
    except InputError as error:
        pytest.skip(str(error))
