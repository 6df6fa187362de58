"""Regions: the modules of a component that repeat, and are compiled once for all of their kind.

A model of its release declares them in `_repeated_blocks`. Where it declares none they are inferred from structure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm_omni_diffusion_compile.compile.state import HOOKS

# Attributes under which a wrapper keeps the module it wraps: FSDP, torch.compile, DataParallel and the like. A block of
# a model may have a `module` of its own, so that one counts only where a declared class lies below it.
_WRAPPED = ("_fsdp_wrapped_module", "_orig_mod")
_PERHAPS_WRAPPED = (*_WRAPPED, "module")
# The class that `fully_shard` (FSDP2, which HSDP is built on) puts between a module's class and a new one of its own.
_SHARDED = "FSDPModule"
# Where its layerwise offload, of one rank and distributed, keeps how the weights look that it has emptied.
_LAYOUTS = ("dtype_metadata", "metadata")
# The modules of one class in a list are worth compiling if they hold a tenth of the component, and all of them together
# have to hold half of it.
_LIST_SHARE = 0.1
_TOTAL_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """A module whose forward is compiled.

    Args:
        path: In its component, dotted.
        cls: Name of its class, as its author wrote it.
        module: The module itself, without wrappers.
    """

    path: str
    cls: str
    module: nn.Module


def declared_regions(component: nn.Module, declared: Collection[str], lists: Collection[str] = ()) -> list[Region]:
    """Find the blocks that a component declares.

    Args:
        component: The component.
        declared: Class names, its `_repeated_blocks`; OmniVoice names the attribute of the list there.
        lists: Attribute names of lists whose members are blocks whatever their class, its
            `_layerwise_offload_blocks_attrs`.

    Returns:
        The outermost blocks, each without its wrappers, in the order of the component. A block inside of another one is
        compiled as a part of that.
    """

    def block(path: str, module: nn.Module) -> nn.Module | None:
        for layer in _layers(module, _PERHAPS_WRAPPED):
            if not declared_names.isdisjoint((type(layer).__name__, _own_class(layer))):
                return layer
        owner, _, name = path.rpartition(".")
        listed = name.isdigit() and owner.rpartition(".")[2] in list_names
        return _unwrapped(module) if listed and has_forward(module) else None

    declared_names = frozenset(declared)
    list_names = declared_names.union(lists)
    if not declared_names:
        return []
    return [
        Region(path=path, cls=_own_class(found), module=found)
        for path, module in _outermost(component, lambda path, module: block(path, module) is not None)
        if (found := block(path, module)) is not None
    ]


def inferred_regions(component: nn.Module, beside: Collection[Any] = ()) -> list[Region]:
    """Find the blocks of a component that declares none.

    A `ModuleList` of two or more members counts if they are of one class. Members that nobody can call, such as lists
    of modules, count as the modules that they hold, and are alike if they hold modules of the same classes. The modules
    of one class in such a list are blocks if they hold a tenth of the component's parameters; all blocks have to hold
    half of them together.

    Args:
        component: The component.
        beside: What in it is no part of the model: an encoder, a VAE.

    Returns:
        The blocks, in the order of the component; empty if most of the component does not repeat.
    """
    sizes = _sizes(component, beside)
    total = sum(sizes.values())
    regions: list[Region] = []
    for path, members in _outermost(component, lambda _, module: _repeats(module)):
        found = [
            Region(path=f"{path}.{name}", cls=_own_class(inner), module=inner)
            for name, module in _outermost(members, _called)
            for inner in [_unwrapped(module)]
        ]
        of_class: dict[type, list[nn.Module]] = {}
        for region in found:
            of_class.setdefault(type(region.module), []).append(region.module)
        large = {cls for cls, modules in of_class.items() if _held(modules, sizes) >= _LIST_SHARE * total}
        regions += [region for region in found if type(region.module) in large]
    if _held((region.module for region in regions), sizes) < max(_TOTAL_SHARE * total, 1):
        return []
    return regions


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a `ModuleList` or `ModuleDict` cannot, whoever uses it calls what it holds."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def callable_members(module: nn.Module) -> list[nn.Module]:
    """What a module that cannot be called holds: the outermost modules that can."""
    return [member for _, member in _outermost(module, _called)]


def hooks_of(module: nn.Module) -> Collection[Any]:
    """The hooks that vLLM-Omni has put on a module: of offload, of caches."""
    hooks: Mapping[str, Any] = getattr(getattr(module, HOOKS, None), "_hooks", {})
    return hooks.values()


def _outermost(component: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of what is wanted below a component, without looking into it; each module once."""
    seen: set[int] = set()

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = f"{prefix}{name}"
            if wanted(path, child):
                yield path, child
            else:
                yield from walk(child, f"{path}.")

    yield from walk(component, "")


def _layers(module: nn.Module, attributes: Sequence[str]) -> Iterator[nn.Module]:
    """Yield a module, what it wraps, what that wraps, and so on."""
    layer: nn.Module | None = module
    while layer is not None:
        yield layer
        inner = (vars(layer).get("_modules", {}).get(name) for name in attributes)
        layer = next((found for found in inner if found is not None), None)


def _unwrapped(module: nn.Module) -> nn.Module:
    return list(_layers(module, _WRAPPED))[-1]


def _called(_: str, module: nn.Module) -> bool:
    return has_forward(module)


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    return len({_classes(member) for member in module}) == 1 and any(True for _ in module.parameters())


def _classes(member: nn.Module) -> frozenset[type]:
    """Class of a member of a list, or the classes of what it holds."""
    held = [member] if has_forward(member) else callable_members(member)
    return frozenset(type(_unwrapped(module)) for module in held)


def _own_class(module: nn.Module) -> str:
    """Class name of a module as its author wrote it: `fully_shard` puts a class of its own in front."""
    cls = type(module)
    if any(base.__name__ == _SHARDED for base in cls.__bases__):
        return cls.__bases__[-1].__name__
    return cls.__name__


def _held(modules: Iterable[nn.Module], sizes: Mapping[int, int]) -> int:
    """How much of a component some modules hold."""
    return sum(sizes.get(key, 0) for key in {id(parameter) for module in modules for parameter in module.parameters()})


def _sizes(component: nn.Module, beside: Collection[Any]) -> dict[int, int]:
    """Sizes of the parameters of a component, by identity."""
    offloaded = _offloaded(component)
    modules = [part for part in beside if isinstance(part, nn.Module)]
    left_out = {id(parameter) for module in modules for parameter in module.parameters()}
    return {
        id(parameter): parameter.numel() or offloaded.get(id(parameter), 0)
        for parameter in component.parameters()
        if id(parameter) not in left_out
    }


def _offloaded(component: nn.Module) -> dict[int, int]:
    """Sizes of the parameters that layerwise offload has emptied, which the host does before it compiles.

    The hook of each block keeps those of the next one.
    """
    hooks = (hook for module in component.modules() for hook in hooks_of(module))
    return {
        id(parameter): layout["shape"].numel()
        for hook in hooks
        if (parameters := getattr(hook, "next_block_parameters", None))
        for attribute in _LAYOUTS
        for layouts in getattr(hook, attribute, {}).values()
        for layout in layouts
        if (parameter := parameters.get(layout["name"])) is not None
    }
