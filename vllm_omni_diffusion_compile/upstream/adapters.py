"""LoRA adapters of declared shapes: looked for before weights are loaded, and in the workers before anything is warmed.

An adapter replaces layers, and the first one of a higher rank replaces their buffers: torch compiles anew whatever it
had compiled for what was there. So all of them come first, and what is warmed then stays.

Source: `diffusion/lora/manager.py`, `_replace_layers_with_lora` and `_ensure_max_lora_rank`, 0.28.0 and 0.30.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import CONFIG, Lora, read_config

_RPC_TIMEOUT_S = 60.0
_FUSED = "distill"


def refuse_adapters(od_config: Any) -> None:
    """Refuse adapters that no request could use, as far as that is known without the model.

    Raises:
        SettingError: A path leads nowhere, or the server takes no adapters from requests.
    """
    settings = getattr(od_config, CONFIG, None)
    if not isinstance(settings, Mapping) or "warmup" not in settings or getattr(od_config, "enforce_eager", False):
        return
    for number, shape in enumerate(read_config(settings).warmup.shapes):
        if shape.lora is None:
            continue
        named = f"{CONFIG}.warmup.shapes[{number}].lora"
        if getattr(od_config, "lora_backend", None) == _FUSED:
            raise SettingError(
                f"{named} names an adapter, but lora_backend is {_FUSED!r}: the one of lora_path becomes part of the "
                "weights, and those of requests are ignored; leave lora out, or use the lora_backend 'peft'"
            )
        if _is_local(shape.lora.path) and not Path(shape.lora.path).expanduser().exists():
            raise SettingError(
                f"{named}.path is {shape.lora.path!r}, where there is nothing; expected the adapter's folder or file, "
                "or a Hugging Face repository"
            )


def _is_local(path: str) -> bool:
    """Whether a path cannot be the name of a repository, which is looked for when a request needs it."""
    return path.startswith(("/", "~", ".")) or path.count("/") > 1


def lora_request(lora: Lora) -> Any:
    """The adapter as a request to the engine has it; of the same id as vLLM-Omni gives it in a request by HTTP."""
    from vllm_omni.lora.request import LoRARequest
    from vllm_omni.lora.utils import stable_lora_int_id

    said = lora.as_request
    return LoRARequest(said["name"], said.get("int_id") or stable_lora_int_id(lora.path), lora.path)


def load_adapters(
    engine: Any, adapters: Iterable[Lora], left_s: Callable[[], float | None], *, stop: Callable[[], bool]
) -> dict[Lora, str]:
    """Have the workers load adapters, none of which is used before a request names it.

    Args:
        engine: Whose workers.
        adapters: In any order.
        left_s: Seconds that are left for those to come; None for as long as it takes. Where the worker runs in this
            process nobody can interrupt it.
        stop: Whether the start is to end: the others are left out.

    Returns:
        Those that could not be loaded, and why.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    reasons = {}
    for lora in adapters:
        request, left = lora_request(lora), left_s()
        if stop() or left == 0:
            reasons[lora] = "the adapter was not loaded: " + ("the start ends" if stop() else "the budget is spent")
            continue
        try:
            engine.collective_rpc("add_lora", timeout=left, args=(request,))
            loaded = engine.collective_rpc("list_loras", timeout=_RPC_TIMEOUT_S)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - the shape fails that names it, and the report says so
            reasons[lora] = f"the adapter could not be loaded ({type(error).__name__}: {error})"
            continue
        # Without a manager of adapters a worker answers a request as if it named none.
        if not all(request.lora_int_id in ids for ids in loaded):
            reasons[lora] = "this server takes no adapters from requests: its own became part of the weights"
    return reasons
