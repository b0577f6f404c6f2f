"""Reading of an adapter's files, in whatever format they are."""

from __future__ import annotations

from collections.abc import Mapping

from executor_service.adapters.gguf_format import read_gguf_adapter
from executor_service.adapters.peft_format import read_peft
from executor_service.model import Adapter, LoadedModel
from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME, AdapterInvalid

_MAX_ERROR_CHARS = 1000


def read_adapter(
    name: str, files: Mapping[str, bytes], loaded: LoadedModel, max_rank: int
) -> Adapter:
    """Returns the adapter in `files`, ready for `loaded`, on its device.

    `name`: its name for rows. `files`: contents by name, those of a PEFT folder or one GGUF file.
    The model's own parts need not be there any more. Raises AdapterInvalid, with file, field, value
    and what is allowed.
    """
    try:
        return _read(name, files, loaded, max_rank)
    except AdapterInvalid as error:
        # Names in the files can be of any length.
        if len(str(error)) <= _MAX_ERROR_CHARS:
            raise
        raise AdapterInvalid(f"{str(error)[:_MAX_ERROR_CHARS]} ...") from error


def _read(name: str, files: Mapping[str, bytes], loaded: LoadedModel, max_rank: int) -> Adapter:
    gguf = [each for each in files if each.endswith(".gguf")]
    if gguf and len(files) == 1:
        return read_gguf_adapter(name, gguf[0], files[gguf[0]], loaded, max_rank)
    for needed in (CONFIG_NAME, WEIGHTS_NAME):
        if needed not in files:
            raise AdapterInvalid(f"{needed} is missing; the files are {', '.join(sorted(files))}")
    return read_peft(name, files, loaded, max_rank)
