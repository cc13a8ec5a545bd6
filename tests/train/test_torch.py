"""Optimizers of torch in a training directory, beside one process that does the same."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.example_programs import needs
from harness.late_imports import optimizers, torch
from harness.mountpoint import eventually
from harness.training_runs import reducing

from irdmafs import client
from irdmafs.train import TrainConfig, TrainError, Worker, begin
from irdmafs.train.directory import TrainDirectory

pytestmark = needs("torch")

SESSIONS = ("kernel",)
STEPS = 5
BATCH = 8
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """With several threads torch may sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(dtype: Any = None, device: str = "cpu") -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 48), torch.nn.Tanh(),
        torch.nn.Linear(48, 3),
    )  # fmt: skip
    return layers.to(device=device, dtype=dtype)


def batch(step: int, worker: int, dtype: Any = None, device: str = "cpu") -> tuple[Any, Any]:
    """A batch whose size depends on the worker."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    count = BATCH + 4 * worker
    inputs = torch.randn(count, 20, generator=generator)
    targets = torch.randn(count, 3, generator=generator)
    return inputs.to(device, dtype), targets.to(device, dtype)


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return torch.nn.functional.mse_loss(model(inputs), targets)


def parameters(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()}


def begin_training(folder: Path, model: Any, config: TrainConfig, shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    client.Store(folder).publish_state_dict(parameters(model), "model.safetensors")
    begin(folder, config, shards=shards)
    return folder


def in_workers(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return [one.result() for one in [threads.submit(work, i) for i in range(count)]]


def train(
    folder: Path,
    make: Callable[[], Any],
    make_batch: Callable[[int, int], tuple[Any, Any]] = batch,
    workers: int = 2,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train with some workers; return the parameters that each of them ends with."""
    models = [make() for _ in range(workers)]
    with ExitStack() as stack:
        stack.enter_context(reducing(folder))
        members = [
            stack.enter_context(
                optimizers.ParameterServerOptimizer(
                    model.named_parameters(), folder, name=f"worker{number}", timeout_s=TIMEOUT_S,
                    **options,
                )
            )
            for number, model in enumerate(models)
        ]  # fmt: skip

        def work(number: int) -> dict[str, Any]:
            for step in range(STEPS):
                inputs, targets = make_batch(step, number)
                members[number].zero_grad()
                loss_of(models[number], inputs, targets).backward()
                members[number].step(weight=len(inputs))
            return parameters(models[number])

        return in_workers(workers, work)


def train_alone(
    model: Any, optimizer: Any, schedule: Any = None, clip_norm: float = 0.0
) -> dict[str, Any]:
    """Train in this process with the batches of two workers together."""
    for step in range(STEPS):
        inputs, targets = map(torch.cat, zip(batch(step, 0), batch(step, 1), strict=True))
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return parameters(model)


def assert_close(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=rtol / 10)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


RULES: dict[str, tuple[dict[str, float | bool], Callable[[Any], Any]]] = {
    "sgd": ({"momentum": 0.9}, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)),
    "adamw": (
        {"weight_decay": 0.1},
        lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    ),
}


# The norm of the gradients is above 0.05 in all steps.
@pytest.mark.parametrize(("rule", "clip_norm"), [("sgd", 0.0), ("adamw", 0.05)])
def test_two_workers_train_as_one_on_both_batches(
    folder: Path, rule: str, clip_norm: float
) -> None:
    options, alone = RULES[rule]
    config = TrainConfig(rule=rule, lr=0.05, options=options, workers=2, clip_norm=clip_norm)
    model = make_model()
    begin_training(folder, model, config, shards=3)
    first, second = train(folder, make_model)
    assert_same(first, second)
    assert_close(first, train_alone(model, alone(model.parameters()), clip_norm=clip_norm))


def test_training_on_a_device_is_training_on_the_host(place: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = TrainConfig(rule="adamw", lr=0.05, workers=2)
    begin_training(place / "run", make_model(), config, shards=2)
    found, _ = train(
        place / "run",
        lambda: make_model(device="cuda"),
        lambda step, worker: batch(step, worker, device="cuda"),
        overlap=True,
    )
    model = make_model()
    expected = train_alone(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.parametrize(("shards", "dtype"), [(1, "bfloat16"), (4, "float32")])
def test_overlap_gives_the_same_bits(place: Path, shards: int, dtype: str) -> None:
    found = []
    kind = getattr(torch, dtype)
    for overlap in (False, True):
        folder = place / f"overlap-{overlap}"
        config = TrainConfig(rule="adamw", lr=0.01, workers=2)
        begin_training(folder, make_model(kind), config, shards)
        found += train(
            folder, lambda: make_model(kind), lambda s, w: batch(s, w, kind), overlap=overlap
        )
    for one in found[1:]:
        assert_same(one, found[0])
    assert all(tensor.dtype == kind for tensor in found[0].values())
    start = parameters(make_model(kind))
    assert not any(torch.equal(found[0][name], start[name]) for name in start)


@contextmanager
def optimizer_of(folder: Path, model: Any, **options: Any) -> Iterator[Any]:
    with (
        reducing(folder),
        optimizers.ParameterServerOptimizer(
            model.named_parameters(), folder, name="worker", timeout_s=TIMEOUT_S, **options
        ) as optimizer,
    ):
        yield optimizer


def test_a_shard_is_written_while_backward_goes_on(place: Path) -> None:
    model = make_model()
    folder = begin_training(place / "run", model, TrainConfig(workers=1), shards=4)
    with optimizer_of(folder, model, overlap=True) as optimizer:
        [staging] = TrainDirectory(folder).staging.glob("worker@*")
        hidden = staging / "worker@1;weight=1.0;base=0"
        files: list[str] = []

        def wait_for_files(_: Any) -> None:
            # The first layer's gradients are the last that backward makes.
            eventually(lambda: any(hidden.glob("[!.]*")), "a shard is written")
            files.extend(os.listdir(hidden))

        model[0].weight.register_hook(wait_for_files)
        loss_of(model, *batch(0, 0)).backward()
        assert 0 < len(files) < 4
        assert not os.listdir(TrainDirectory(folder).push)
        optimizer.step()
        assert optimizer.worker.version == 1
        assert not hidden.exists()


@pytest.mark.parametrize("shards", [1, 4])
def test_gradients_that_change_after_backward_are_pushed_as_they_are_at_the_step(
    place: Path, shards: int
) -> None:
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for overlap, seen in found.items():
        model = make_model()
        folder = begin_training(
            place / f"overlap-{overlap}", model, TrainConfig(lr=0.5, workers=1), shards
        )
        with optimizer_of(folder, model, overlap=overlap) as optimizer:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for change in ("accumulate", "clip", "unscale", "data", "replace", "drop", "skip"):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, *batch(0, 0))).backward()
                if overlap:
                    wait(optimizer._early._push._written.values())
                if change == "accumulate":
                    loss_of(model, *batch(1, 0)).backward()
                elif change == "clip":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                elif change == "unscale":
                    scaler.unscale_(optimizer)
                elif change == "data":
                    model[0].bias.grad.data.neg_()
                elif change == "replace":
                    model[2].weight.grad = torch.ones_like(model[2].weight)
                elif change == "drop":
                    model[2].weight.grad = None
                else:
                    optimizer.zero_grad()
                    loss_of(model, *batch(2, 0)).backward()
                optimizer.step()
                seen.append(parameters(model))
    for plain, overlapped in zip(*found.values(), strict=True):
        assert_same(overlapped, plain)


def test_learning_rate_scheduler_rules_the_directory(place: Path) -> None:
    def warm_up(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))

    model, alone = make_model(), make_model()
    folder = begin_training(place / "run", model, TrainConfig(lr=0.1, workers=1))
    with optimizer_of(folder, model) as optimizer:
        schedule = warm_up(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0
        found = train_alone(model, optimizer, schedule)
    expected = torch.optim.SGD(alone.parameters(), lr=0.1)
    assert_close(found, train_alone(alone, expected, warm_up(expected)))


def test_parameters_without_gradient_stay_and_newest_version_is_there_at_once(place: Path) -> None:
    model, other = make_model(), make_model()
    folder = begin_training(place / "run", model, TrainConfig(lr=0.1, workers=1))
    model[0].requires_grad_(False)
    before = parameters(model)
    with optimizer_of(folder, model, overlap=True) as optimizer:
        loss = optimizer.step(lambda: _backward(model))
        assert loss > 0
    after = parameters(model)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["4.weight"], before["4.weight"])
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.zero_()
    with optimizers.ParameterServerOptimizer(other.named_parameters(), folder, name="later"):
        assert_same(parameters(other), after)


def _backward(model: Any) -> Any:
    loss = loss_of(model, *batch(0, 0))
    loss.backward()
    return loss.item()


def test_parameters_that_the_directory_does_not_have_are_refused(place: Path) -> None:
    model = make_model()
    folder = begin_training(place / "run", model, TrainConfig())
    with pytest.raises(TrainError, match=r"has no parameter 'other\.weight'"):
        optimizers.ParameterServerOptimizer(
            torch.nn.ModuleDict({"other": torch.nn.Linear(2, 2)}).named_parameters(), folder
        )
    with pytest.raises(TrainError, match=r"'0\.weight' has the shape \[2, 2\], and \[64, 20\] in"):
        optimizers.ParameterServerOptimizer([("0.weight", torch.zeros(2, 2))], folder)
    with pytest.raises(ValueError, match="named_parameters"):
        optimizers.ParameterServerOptimizer(model.parameters(), folder)
    assert os.listdir(TrainDirectory(folder).workers) == []


def test_diloco_that_synchronizes_every_step_is_the_inner_optimizer(folder: Path) -> None:
    model, alone = make_model(), make_model()
    config = TrainConfig(
        rule="diloco", lr=1.0, options={"momentum": 0.0, "nesterov": False}, sync="local:1",
        workers=1,
    )  # fmt: skip
    begin_training(folder, model, config, shards=2)
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    expected = torch.optim.AdamW(alone.parameters(), lr=0.01)
    with (
        reducing(folder),
        optimizers.DiLoCo(inner, folder, name="worker", timeout_s=TIMEOUT_S) as optimizer,
    ):
        for step in range(STEPS):
            for one, which in ((model, optimizer), (alone, expected)):
                _step(one, which, step, 0)
        assert optimizer.worker.version == STEPS
    assert_close(parameters(model), parameters(alone), rtol=1e-6)


def test_diloco_moves_to_the_mean_of_the_workers_every_h_steps(place: Path) -> None:
    config = TrainConfig(
        rule="diloco", lr=1.0, options={"momentum": 0.0, "nesterov": False}, sync="local:3",
        workers=2,
    )  # fmt: skip
    folder = begin_training(place / "run", make_model(), config)
    models, alone = ([make_model(), make_model()] for _ in range(2))
    with ExitStack() as stack:
        stack.enter_context(reducing(folder))
        members = [
            stack.enter_context(
                optimizers.DiLoCo(_sgd(model), folder, name=f"worker{i}", timeout_s=TIMEOUT_S)
            )
            for i, model in enumerate(models)
        ]

        def work(number: int) -> None:
            for step in range(3):
                _step(models[number], members[number], step, number)

        in_workers(2, work)
        assert [one.worker.version for one in members] == [1, 1]
    for number, model in enumerate(alone):
        optimizer = _sgd(model)
        for step in range(3):
            _step(model, optimizer, step, number)
    first, second = map(parameters, alone)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    assert_close(parameters(models[0]), mean)
    assert_same(parameters(models[0]), parameters(models[1]))


def _sgd(model: Any) -> Any:
    return torch.optim.SGD(model.named_parameters(), lr=0.1)


def _step(model: Any, optimizer: Any, step: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, *batch(step, number)).backward()
    optimizer.step()


def test_diloco_says_what_is_missing(place: Path) -> None:
    model = make_model()
    folder = begin_training(
        place / "run", model, TrainConfig(rule="diloco", lr=0.7, sync="local:5")
    )
    other = begin_training(place / "other", model, TrainConfig(rule="diloco", lr=0.7))
    with pytest.raises(TrainError, match="has no sync local:H"):
        optimizers.DiLoCo(_sgd(model), other)
    with pytest.raises(ValueError, match="does not know the names"):
        optimizers.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), folder)
    with optimizers.DiLoCo(_sgd(model), folder) as optimizer:
        assert optimizer.every == 5


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_pull_copies_what_shards_cut_into_tensors(place: Path, kind: str, transposed: bool) -> None:
    """Tensors of the parameters' type get their bits; those of another type are converted."""
    dtype = getattr(torch, kind)
    values = {"w": torch.randn(40, 30).bfloat16(), "b": torch.randn(7).bfloat16()}
    folder = place / "run"
    folder.mkdir()
    with client.open(folder) as store:
        store.publish_state_dict(values)
    begin(folder, TrainConfig(rule="sum"), shards=3)
    out = {"w": torch.zeros(40, 30, dtype=dtype), "b": torch.zeros(7, dtype=dtype)}
    if transposed:
        out["w"] = torch.zeros(30, 40, dtype=dtype).t()
    with Worker(folder, "w") as worker:
        worker.pull(out)
    assert all(torch.equal(out[name], value.to(dtype)) for name, value in values.items())
