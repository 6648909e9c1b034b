"""The command `mirror-sd convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mirror_sd import model_store
from mirror_sd.bench.options import AsJson, show, table
from mirror_sd.conversion import directory, error, source
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from mirror_sd.uir.precision_plan import PrecisionPlan
from mirror_sd.uir.program import Program
from mirror_sd.uir.stored_format import StoredFormat

app = typer.Typer(add_completion=False, help="Convert a model to another number format.")
# What the error of states is measured on: prose, code, numbers and another script.
TEXT = (
    "Thank you for writing to us. Your order 48213 left the warehouse on Monday and should arrive"
    " within three working days. def refund(order):\n    return order.price * 0.95\n"
    "您的包裹已签收。 If it does not, write again, and we will send the two blue lamps once more."
)
_TOKENS = 128


@app.command(
    epilog="Examples: `mirror-sd convert smollm2-135m-instruct /models/small-int8 --precision int8"
    " --report` · `mirror-sd convert /models/mine /models/mine-fp16 --precision fp16 --ema"
    " /models/mine/ema.safetensors`"
)
def convert(
    model: Annotated[str, typer.Argument(help="Name, Hugging Face directory or .gguf file.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not be there.")],
    precision: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16|int8", help="Of the matrices.")
    ] = "bf16",
    scales: Annotated[
        str, typer.Option(metavar="channel|group", help="What shares a scale of int8.")
    ] = "group",
    group: Annotated[
        int, typer.Option(min=1, max=65536, help="Inputs that share a scale, with --scales group.")
    ] = 32,
    ema: Annotated[
        Path | None,
        typer.Option(help="Take the weights from this file or directory of averaged ones."),
    ] = None,
    has_report: Annotated[
        bool, typer.Option("--report", help="Print the error of each layer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model as safetensors in another number format; every command takes the result.

    Norms and biases stay fp32. int8 is 8-bit codes with fp32 scales. The report compares what was
    written, read back, with the source.
    """
    chosen = _format(precision, scales, group)
    files = model_store.resolve(model)
    original = source.load(files, ema)
    target = directory.write(original, files, out, chosen, lambda line: typer.echo(line, err=True))
    # By its whole path: a folder may be called what a registered model is.
    written = model_store.resolve(str(target))
    size = (written.path / directory.WEIGHTS).stat().st_size
    facts: dict[str, Any] = {
        "model": files.name,
        "source": str(ema or files.path),
        "path": str(written.path),
        "precision": precision,
        "group": chosen.group,
        "bytes": size,
    }
    if has_report:
        _report(facts, original, written, as_json)
    elif as_json:
        show(facts, as_json)
    else:
        typer.echo(f"wrote {written.path}, {size >> 20} MB of weights in {precision}")


def _format(precision: str, scales: str, group: int) -> StoredFormat:
    if scales not in ("channel", "group"):
        raise typer.BadParameter("write channel or group", param_hint="--scales")
    match precision:
        case "fp32" | "bf16" | "fp16":
            return StoredFormat(precision)
        case "int8":
            return StoredFormat("int8", group if scales == "group" else None)
    raise typer.BadParameter("write fp32, bf16, fp16 or int8", param_hint="--precision")


def _report(facts: dict[str, Any], original: Program, written: ModelFiles, as_json: bool) -> None:
    converted = program.load(written, PrecisionPlan.of("fp32"))
    layers = error.of_weights(original, converted)
    tokens = _tokens(written, original)
    outputs = error.of_outputs(original, converted, tokens, layers)
    if as_json:
        rows = [
            {
                "layer": one.layer,
                "weights": one.relative,
                "worst": one.worst,
                "worst_weights": one.worst_relative,
                "largest": one.largest,
                "states": one.state,
            }
            for one in layers
        ]
        measured = {
            "positions": outputs.positions,
            "max_logit_error": outputs.max_logit,
            "mean_kl": outputs.kl,
            "top1_agreement": outputs.top1_agreement,
        }
        show(facts | {"layers": rows, "outputs": measured}, as_json)
        return
    typer.echo(
        table([one.row() for one in layers], ("layer", "weights", "worst", "largest", "states"))
    )
    typer.echo(
        "weights: relative error of a layer's matrices, and of the worst of them; largest: the"
        " largest difference of a weight; states: relative error of the residual stream after"
        " the layer"
    )
    typer.echo(
        f"logits over {outputs.positions} positions: largest error {outputs.max_logit:.3g},"
        f" mean KL {outputs.kl:.2e} nats, {100 * outputs.top1_agreement:.1f} % of the best tokens"
        " equal"
    )
    typer.echo(f"wrote {written.path}, {facts['bytes'] >> 20} MB of weights")


def _tokens(written: ModelFiles, original: Program) -> list[int]:
    from tokenizers import Tokenizer

    limit = min(_TOKENS, original.spec.max_context)
    tokenizer = Tokenizer.from_file(str(written.path / "tokenizer.json"))
    ids = [i for i in tokenizer.encode(TEXT).ids if i < original.spec.vocab_size]
    return ids[:limit]
