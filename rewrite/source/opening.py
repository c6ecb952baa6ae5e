"""From a spec to a ModelSource: which form it has, and the steps for each form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import SourceError

from . import files
from .model_source import ModelSource
from .request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .stored import Stored


def open_any(request: Request) -> ModelSource:
    """Open whatever the spec names; an existing path comes before a factory."""
    request.torch_dtype()
    path = Path(request.spec)
    if not path.is_dir():
        request.refuse("other than a folder", "lazy")
    try:
        if path.is_dir():
            return _open_folder(path, request)
        if path.is_file():
            return _open_file(path, request)
    except OSError as error:
        raise SourceError(
            f"{path.name} cannot be read: {error.strerror or files.first_line(error)}",
            where=str(error.filename or path),
            hint="check the permissions and the disk",
        ) from error
    from .factory import build, is_factory_spec

    if not is_factory_spec(request.spec):
        raise _absent(request.spec)
    request.refuse("factory", "arch")
    return _from_module("factory", None, request, *build(request.spec))


def _open_folder(path: Path, request: Request) -> ModelSource:
    if path.suffix == ".hcx":
        request.refuse("hcx", "lazy")
        return ModelSource(None, (), {}, "hcx", path.name, path=str(path))
    names = sorted(item.name for item in path.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    if len(ggufs) == 1 and not ("config.json" in names and weights):
        request.refuse("gguf", "lazy")
        return _open_gguf(path / ggufs[0], request)
    if "config.json" not in names or "adapter_config.json" in names:
        raise _no_model(path, names, ggufs)
    from .hf import load_model
    from .text import has_tokenizer, load_tokenizer, read_companions

    request.refuse("hf", "arch")
    companions = read_companions(path)
    stored: dict[str, Stored] = {}
    if request.lazy:
        from .lazy import lazy_model

        request.refuse("hf that is read lazily", "dtype")
        model, stored = lazy_model(path, trust=request.trust)
    else:
        model = load_model(path, trust=request.trust, dtype=request.torch_dtype())
    tokenizer = (lambda: load_tokenizer(path, trust=request.trust)) if has_tokenizer(names) else None
    kwargs = _example(model, tokenizer, request)
    return ModelSource(model, (), kwargs, "hf", path.resolve().name, companions, path=str(path), stored=stored)


def _open_file(path: Path, request: Request) -> ModelSource:
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return _open_gguf(path, request)
    if suffix in (*files.WEIGHT_SUFFIXES, ".pt2", ".safetensors"):
        return _open_weights(path, request)
    if suffix == ".onnx":
        files.check_onnx(path)
        raise SourceError(
            f"{path.name} is an ONNX model, which hcx writes and does not read",
            where=str(path),
            hint="open the PyTorch model that it was exported from",
        )
    if suffix == ".json":
        files.check_json(path)
        raise SourceError(
            f"{path.name} is a JSON file, not a model", where=str(path), hint="open the folder it lies in"
        )
    other = files.foreign_name(files.head(path))
    raise SourceError(
        f"{path.name} is {other}" if other else f"{path.name} has no known extension",
        where=str(path),
        hint=f"a model is {files.SUPPORTED}",
    )


def _open_gguf(path: Path, request: Request) -> ModelSource:
    from .gguf import load_gguf

    request.refuse("gguf", "arch")
    model, tokenizer, companions = load_gguf(path, dtype=request.torch_dtype())
    kwargs = _example(model, (lambda: tokenizer) if tokenizer is not None else None, request)
    return ModelSource(model, (), kwargs, "gguf", path.name, companions, path=str(path))


def _open_weights(path: Path, request: Request) -> ModelSource:
    """A file of torch's: told apart by what is in it, not by its extension."""
    from .torch_file import content, with_architecture

    kind, value = content(path, trust=request.trust)
    if path.suffix.lower() == ".pt2" and kind != "pt2":
        raise SourceError(
            f"{path.name} is no torch.export archive: it holds a {kind.replace('_', ' ')}",
            where=str(path),
            hint="rename it to .pt, or save it with torch.export.save",
        )
    if kind == "pt2":
        return _open_archive(path, request)
    if kind == "pickle":
        request.refuse(kind, "arch")
        return _from_module(kind, path, request, value, None, {})
    model, args, kwargs, by_config = with_architecture(path, value, request.arch, trust=request.trust)
    return _from_module(kind, path, request, model, args, kwargs, by_config=by_config)


def _open_archive(path: Path, request: Request) -> ModelSource:
    from .inputs_file import GIVE_INPUTS, from_file
    from .pt2 import example_call, load_archive

    request.refuse("pt2", "arch", "dtype", "text")
    exported = load_archive(path, trust=request.trust)
    call = ((), from_file(Path(request.inputs), None)) if request.inputs else example_call(exported)
    if call is None:
        raise SourceError(f"{path.name} was saved without its example inputs", where=str(path), hint=GIVE_INPUTS)
    args, kwargs = call
    return ModelSource(None, args, kwargs, "pt2", path.name, exported=exported, path=str(path))


def _from_module(
    kind: str,
    path: Path | None,
    request: Request,
    model: torch.nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any],
    *,
    by_config: bool = False,
) -> ModelSource:
    """Eval mode, dtype and example for a module that came from a factory, a pickle or a state dict."""
    from .text import has_tokenizer, load_tokenizer, read_companions

    model.eval()
    if dtype := request.torch_dtype():
        model.to(dtype)
        args = None if args is None else tuple(_cast(value, dtype) for value in args)
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    companions = read_companions(path.parent) if path and by_config else {}
    if args is None or request.inputs is not None:
        tokenizer = (lambda: load_tokenizer(path.parent)) if path and has_tokenizer(companions) else None
        args, kwargs = (), _example(model, tokenizer, request)
    else:
        request.refuse(f"{kind} with an example of its own", "text")
    label = path.name if path else request.spec
    return ModelSource(model, args, kwargs, kind, label, companions, path=str(path) if path else None)


def _example(model: torch.nn.Module, tokenizer: Callable[[], Any] | None, request: Request) -> dict[str, Any]:
    """Example keyword arguments: the caller's file, or made for the model."""
    from .examples import from_model
    from .inputs_file import from_file

    if request.inputs is None:
        return from_model(model, tokenizer, request.text)
    request.refuse("one with an inputs file", "text")
    return from_file(Path(request.inputs), model)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if hasattr(value, "is_floating_point") and value.is_floating_point() else value


def _absent(spec: str) -> SourceError:
    """A spec that is neither there nor a factory."""
    path = Path(spec)
    if "://" in spec or (spec.count("/") == 1 and not path.suffix and not path.parent.exists()):
        return SourceError(
            f"{spec} is not on this machine, and hcx downloads nothing",
            where=spec,
            hint="download the model first and give the local folder",
        )
    what = "file" if path.suffix else "file, folder or factory"
    return SourceError(f"there is no {what} {spec}", where=spec, hint=f"a model is {files.SUPPORTED}")


def _no_model(path: Path, names: list[str], ggufs: list[str]) -> SourceError:
    """A folder that is no model, with what it holds instead."""
    if "adapter_config.json" in names:
        return SourceError(
            f"{path.name} is an adapter, not a model",
            where=str(path),
            hint="open its base model, then load the adapter into it",
        )
    if ggufs:
        return SourceError(
            f"{path.name} holds {len(ggufs)} GGUF files",
            where=str(path),
            hint="give one of them: " + ", ".join(ggufs[:4]),
        )
    return SourceError(
        f"{path.name} has no config.json", where=str(path), hint="it holds: " + (", ".join(names[:8]) or "nothing")
    )
