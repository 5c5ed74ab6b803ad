"""Hugging Face's Trainer on a staged step: the numbers of the plain Trainer, on simulated meshes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import colofunc as cf

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
from colofunc.integrations.own_rows import KEY, OwnRows  # noqa: E402
from colofunc.integrations.transformers import ColofuncTrainer  # noqa: E402

# Communication is free, so that tiny models are split at all.
DP, DP_TP = cf.Mesh(dp=2, topology="ideal"), cf.Mesh(dp=2, tp=2, topology="ideal")
MESHES = [DP, DP_TP]


class Tokens(torch.utils.data.Dataset):
    """Random tokens; a third of the labels are ignored, so that batches weigh differently."""

    def __init__(self, n: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 64, (n, 12), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(n, 12, generator=generator) < 0.33, -100)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.read.append(i)
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def gpt2(layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=layers, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config).double()


def arguments(path: Path, **options: Any) -> Any:
    common = dict(
        output_dir=str(path), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=5, logging_steps=1,
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return transformers.TrainingArguments(**{**common, **options})


def trainer(path: Path, mesh: cf.Mesh | None, cls: Any = None, layers: int = 1, **options: Any) -> Any:
    keys = ("compute_loss_func", "compute_metrics", "callbacks", "chain", "plans", "read")
    more = {key: options.pop(key) for key in keys if key in options}
    more |= {} if mesh is None else {"mesh": mesh}
    cls = cls or (transformers.Trainer if mesh is None and "chain" not in more else ColofuncTrainer)
    return cls(gpt2(layers), arguments(path, **options), train_dataset=Tokens(22), eval_dataset=Tokens(7, seed=1), **more)


def history(run: Any, keys: tuple[str, ...] = ("loss", "grad_norm", "learning_rate", "eval_loss")) -> list[float]:
    return [float(entry[key]) for entry in run.state.log_history for key in keys if key in entry]


def same(mine: Any, theirs: Any) -> None:
    with cf.testing.float64():
        a, b = mine.train(), theirs.train()
    assert history(mine) == pytest.approx(history(theirs), rel=1e-10)
    assert len(history(mine)) >= 12 and a.training_loss == pytest.approx(b.training_loss, rel=1e-10)
    specs = {str(p.spec) for p in mine._loop.state["params"].values()}
    assert all(any(axis in spec for spec in specs) for axis in mine._mesh.axis_names), specs
    for (name, p), q in zip(mine.model.named_parameters(), theirs.model.parameters(), strict=True):
        # Key biases of attention have a gradient of rounding noise, which Adam's 1/(sqrt(v) + 1e-8) blows up.
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("mesh", [pytest.param(DP, marks=pytest.mark.sweep), DP_TP], ids=repr)
def test_losses_norms_and_weights_are_the_plain_trainers(mesh: cf.Mesh, tmp_path: Path) -> None:
    options = dict(eval_strategy="steps", eval_steps=2)
    same(trainer(tmp_path, mesh, **options), trainer(tmp_path, None, **options))


def test_plans_place_what_they_name(tmp_path: Path) -> None:
    run = trainer(tmp_path, MESHES[1], layers=2, plans={"*.c_fc.weight": "i (tp o)"}, max_steps=1)
    run.train()
    assert "tp" in str(run._loop.state["params"]["transformer.h.1.mlp.c_fc.weight"].spec).split(" ", 1)[1]


def test_accumulation_weighs_tokens(tmp_path: Path) -> None:
    """Six batches in twos and threes, the last one of two rows: every label that counts weighs the same."""
    options = dict(gradient_accumulation_steps=4)
    same(trainer(tmp_path, DP, **options), trainer(tmp_path, None, **options))


def test_without_clipping_the_norm_is_reported(tmp_path: Path) -> None:
    options = dict(max_grad_norm=0.0, max_steps=3, optim="sgd", lr_scheduler_type="linear", eval_strategy="steps", eval_steps=1)
    same(trainer(tmp_path, DP, **options), trainer(tmp_path, None, **options))


def mean_of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.square().sum() / num_items_in_batch


def spread(prediction: Any) -> dict[str, float]:
    return {"spread": float(prediction.predictions.std()), "labels": float(prediction.label_ids.sum())}


def test_losses_and_metrics_of_the_user(tmp_path: Path) -> None:
    options = dict(compute_loss_func=mean_of_logits, compute_metrics=spread, max_steps=2)
    mine, theirs = (trainer(tmp_path, mesh, **options) for mesh in (DP, None))
    found, want = [], []
    with cf.testing.float64():
        for run, seen in ((mine, found), (theirs, want)):
            for metrics in (run.evaluate(), run.train().metrics, run.evaluate()):
                seen += [metrics[key] for key in ("eval_loss", "eval_spread", "eval_labels", "train_loss") if key in metrics]
    assert len(found) == 7 and found == pytest.approx(want, rel=1e-10)


def test_microbatches_of_a_chain(tmp_path: Path) -> None:
    """The chain splits each batch in time, the Trainer adds two of them up."""
    with cf.testing.float64():
        options = dict(max_steps=2, gradient_accumulation_steps=2, max_grad_norm=0.0, compute_loss_func=mean_of_logits)
        mine = trainer(tmp_path, None, chain={"mesh": {"dp": 2, "topology": "ideal"}, "accumulate": 2}, **options)
        theirs = trainer(tmp_path, None, **options)
        mine.train(), theirs.train()
    assert history(mine) == pytest.approx(history(theirs), rel=1e-10)


def test_microbatches_of_a_language_models_own_loss(tmp_path: Path) -> None:
    """The Trainer hands it the number of labels, so it is a sum divided by an argument."""
    with cf.testing.float64():
        mine = trainer(tmp_path, None, chain={"mesh": {"dp": 2, "topology": "ideal"}, "accumulate": 2}, max_steps=2)
        theirs = trainer(tmp_path, None, max_steps=2)
        mine.train(), theirs.train()
    assert history(mine) == pytest.approx(history(theirs), rel=1e-10)


def test_a_saved_model_loads_and_a_checkpoint_resumes(tmp_path: Path) -> None:
    """Here on another mesh, and in the plain Trainer."""
    with cf.testing.float64():
        whole = trainer(tmp_path / "whole", None)
        whole.train()
        first = trainer(tmp_path, DP, save_strategy="steps", save_steps=3)
        first.train()
        folder = str(tmp_path / "checkpoint-3")
        for mesh in (cf.Mesh(tp=2, topology="ideal"), None):
            again = trainer(tmp_path / "again", mesh)
            again.train(resume_from_checkpoint=folder)
            assert history(again) == pytest.approx(history(whole), rel=1e-10)
    first.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for p, q in zip(loaded.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)


def test_a_configured_chain(tmp_path: Path) -> None:
    with cf.testing.float64():
        mine = trainer(tmp_path, None, chain={"mesh": {"dp": 2, "topology": "ideal"}, "clip": 0.5}, max_steps=2, max_grad_norm=7.0)
        theirs = trainer(tmp_path, None, max_steps=2)
        mine.train(), theirs.train()
    assert isinstance(mine, ColofuncTrainer) and history(mine) == pytest.approx(history(theirs), rel=1e-10)


class Files(transformers.TrainerCallback):
    """Which rank writes and logs."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "trainer_state.json").exists()  # on all ranks, at once
        assert state.is_world_process_zero == (torch.distributed.get_rank() == 0) == args.should_save == args.should_log


KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_spread", "eval_labels", "eval_ids")
OPTIONS = dict(eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=2, max_steps=4)


def on_a_rank(path: str) -> Any:
    """As under torchrun, which tells accelerate of the processes."""
    rank = str(torch.distributed.get_rank())
    os.environ.update(LOCAL_RANK=rank, RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with cf.testing.float64():
        run = trainer(Path(path), DP, save_strategy="steps", save_steps=2, callbacks=[Files()], compute_metrics=spread, **OPTIONS)
        run.train()
        assert run.args.distributed_state.num_processes == 2 and run.args.world_size == 1
        assert all(len(p.parts) == 1 for p in run._loop.state["params"].values())  # of this rank
        again = trainer(Path(path) / "again", DP, compute_metrics=spread, **OPTIONS)
        again.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    run.save_model(f"{path}/saved")
    return history(run, KEYS), history(again, KEYS)


@pytest.mark.dist
def test_on_real_ranks(tmp_path: Path) -> None:
    """Two processes: the numbers of one, on both; one of them writes; what it wrote resumes, here and in the plain Trainer."""
    ranks = cf.launch(on_a_rank, 2, str(tmp_path))
    with cf.testing.float64():
        whole = trainer(tmp_path / "whole", None, compute_metrics=spread, **OPTIONS)
        whole.train()
        plain = trainer(tmp_path / "plain", None, compute_metrics=spread, **OPTIONS)
        plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    want = history(whole, KEYS)
    assert len(want) == 18
    for found in (*ranks[0], *ranks[1], history(plain, KEYS)):
        assert found == pytest.approx(want, rel=1e-10)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for p, q in zip(loaded.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)
    assert type(torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)) is transformers.TrainingArguments


def own_rows(layout: str, pads: bool, rows: int = 4) -> Any:
    """Rows of rank 0 as they are read where a plan has laid a batch so."""
    own, ids = OwnRows(DP_TP), torch.zeros(rows, 3, dtype=torch.int64)
    sampler = own.sampler(torch.utils.data.BatchSampler(range(6), rows, drop_last=False))
    batch = own.placed({"input_ids": ids, "labels": ids, KEY: torch.tensor(next(iter(sampler)).told)})
    assert batch.keys() == {"input_ids", "labels"}
    own.found([cf.Spec(text).bind(DP_TP, (rows, 3)) for text in ("b s", layout)], batch, pads)
    return own, [(list(indices), indices.told[1]) for indices in sampler]


def test_rows_are_read_as_the_plan_has_them() -> None:
    assert own_rows("b (s)", True)[1] == [([0, 1, 2, 3], 0), ([4, 5], 0)]  # no rank has rows of its own
    assert own_rows("(dp b) s", True)[1] == [([0, 1], 4), ([4, 5], 4)]
    assert own_rows("(dp b) s", False)[1] == [([0, 1], 4), ([4], 2)]
    assert own_rows("(b dp) s", False)[1] == [([0, 2], 4), ([4], 2)]
    assert own_rows("(dp tp) s", True)[1] == [([0], 4), ([4], 4)]
    assert own_rows("(dp tp) s", False)[1] == [([0], 4), ([4, 5], 0)]  # 2 rows for 4 ranks
    own, _ = own_rows("(dp b) s", True)
    assert own.cut(5, None) is None and own.cut(6, None) == ([0, 1, 2], 6)  # batches of any size: never filled up


def test_what_is_drawn_for_own_rows_leaves_shuffling_alone() -> None:
    own, _ = own_rows("(dp b) s", True)
    first, second = list(own.sampler(torch.utils.data.BatchSampler(range(8), 4, drop_last=False)))
    data, collate = own.data([0.0] * 8), own.collate(lambda samples: {"x": torch.rand(len(samples))})
    before = torch.get_rng_state()
    drawn = [collate(data.__getitems__(some))["x"] for some in (first, second, first)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    with pytest.raises(cf.InputError, match="the first batches were mappings, and now list was collated"):
        own.collate(lambda samples: samples)(data.__getitems__(first))


# Batches of 4, the last of 2 (evaluated: of 3).
EPOCH = dict(
    max_steps=6, eval_strategy="epoch", include_for_metrics=["inputs"],
    compute_metrics=lambda p: {**spread(p), "ids": float(p.inputs.sum())},
)


def reading(path: str) -> Any:
    """What a rank reads of an epoch, and its numbers: with the model's loss, and with one that counts every row."""
    found = []
    with cf.testing.float64():
        for options in ({}, {"compute_loss_func": mean_of_logits}):
            run = trainer(Path(path), DP, **options, **EPOCH)
            run.train()
            found.append((run.train_dataset.read, run.eval_dataset.read, history(run, KEYS)))
        everything = trainer(Path(path), DP, read="all", max_steps=3)
        everything.train()
        assert len(everything.train_dataset.read) == 16
    return found


@pytest.mark.dist
def test_a_rank_reads_its_own_rows(tmp_path: Path) -> None:
    """The first batches are whole, as there is no plan yet; then each row is read once, in the Trainer's order."""
    ranks = cf.launch(reading, 2, str(tmp_path))
    for k, options in enumerate(({}, {"compute_loss_func": mean_of_logits})):
        with cf.testing.float64():
            whole = trainer(tmp_path, None, **options, **EPOCH)
            whole.train()
        order, asked, want = whole.train_dataset.read, whole.eval_dataset.read, history(whole, KEYS)
        (a, asked_a, numbers), (b, asked_b, others) = ranks[0][k], ranks[1][k]
        assert len(order) == 22 and len(asked) == 7 and len(want) == 22
        assert numbers == pytest.approx(want, rel=1e-10) and others == pytest.approx(want, rel=1e-10)
        assert a[:8] == b[:8] == order[:8]  # accelerate reads one batch ahead
        assert (a[8:14], b[8:14]) == (order[8:10] + order[12:14] + order[16:18], order[10:12] + order[14:16] + order[18:20])
        if k == 0:  # filled up to 4 rows, those added without labels
            assert a[14:] == b[14:] == order[20:]
            assert (asked_a, asked_b) == (asked[:2] + asked[4:6], asked[2:4] + [asked[6], asked[4]])
        else:  # every row counts: a batch of 2 is cut in two, one of 3 read whole
            assert (a[14:], b[14:]) == (order[20:21], order[21:])
            assert (asked_a, asked_b) == (asked[:2] + asked[4:], asked[2:4] + asked[4:])


def in_a_process_group(path: str) -> Any:
    """Where accelerate knows nothing of the other process; and a mesh that is not theirs."""
    with cf.testing.float64():
        run = trainer(Path(path) / str(torch.distributed.get_rank()), DP, max_steps=2, save_strategy="steps", save_steps=2)
        run.train()
    with pytest.raises(cf.InputError) as caught:
        trainer(Path(path), DP_TP)
    with pytest.raises(cf.InputError, match=r"batch 1 holds other rows on ranks \[1\] than on rank 0"):
        trainer(Path(path), DP, seed=torch.distributed.get_rank()).train()
    return history(run), sorted(os.listdir(run.args.output_dir)) if os.path.exists(run.args.output_dir) else [], str(caught.value)


@pytest.mark.dist
def test_in_a_process_group(tmp_path: Path) -> None:
    (mine, files, said), (other, none, _) = cf.launch(in_a_process_group, 2, str(tmp_path))
    with cf.testing.float64():
        whole = trainer(tmp_path, None, max_steps=2)
        whole.train()
    assert mine == other == pytest.approx(history(whole), rel=1e-10)
    assert files == ["checkpoint-2"] and none == [] and "has 4 ranks, and 2 processes were started" in said


class Peeking(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fp16": True}, r"TrainingArguments\(fp16=True\) clashes .* Try: bf16=True"),
        ({"auto_find_batch_size": True}, r"TrainingArguments\(auto_find_batch_size=True\) clashes"),
        ({"neftune_noise_alpha": 5.0}, r"TrainingArguments\(neftune_noise_alpha=5.0\) clashes"),
        ({"optim": "adafactor"}, "optimizer Adafactor cannot be adapted"),
        ({"callbacks": [Peeking()]}, "callback Peeking overrides on_pre_optimizer_step"),
        ({"chain": {"mesh": {"dp": 2, "topology": "ideal"}}}, "the chain says mesh and plans; drop mesh="),
        ({"chain": {"mesh": {"dq": 2}, "zerro": 3}}, "unknown key 'zerro'"),
        ({"read": "owm"}, "read='owm'; did you mean 'own'"),
    ],
)
def test_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    mesh = None if "zerro" in str(options) else DP
    with pytest.raises(cf.ColofuncError, match=says):
        trainer(tmp_path, mesh, **options).train()


def test_deepspeed_and_fsdp_clash(tmp_path: Path) -> None:
    for name in ("deepspeed", "fsdp"):
        args = arguments(tmp_path)
        setattr(args, name, "on")  # with the packages, their own checks of their options come first
        with pytest.raises(cf.InputError, match=rf"TrainingArguments\({name}='on'\) clashes .* Try: drop it"):
            ColofuncTrainer(gpt2(1), args, mesh=DP)


def test_the_pages_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "integrations.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(page.split("```py\n")[2].split("```")[0], names)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.n_embd == 32
    assert names["trainer"].state.global_step == 4
