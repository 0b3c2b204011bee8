"""The memory manager on the simulated device, with real diffusers and transformers modules."""

from __future__ import annotations

import gc
import threading
import weakref
from types import ModuleType

import psutil
import pytest
import torch
from ballast.memory import DoesNotFitError, ManagedModel, manager
from ballast.memory.memory_manager import MemoryManager
from ballast.memory.planning.fit import sizes_of
from ballast.memory.vocabulary import Role
from diffusers import AutoencoderKL, Lumina2Transformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel


def encoder(width: int = 64, layers: int = 2) -> CLIPTextModel:
    config = CLIPTextConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=4, num_hidden_layers=layers, vocab_size=1000
    )
    return CLIPTextModel(config).eval()


def tokens(device: str = "sim") -> torch.Tensor:
    return torch.arange(8, device=device)[None]


def on_device(unit: ManagedModel) -> int:
    """The bytes of a resident unit, whose table of tokens stays in RAM."""
    return sizes_of(unit).resident_bytes


def unit(name: str, width: int = 64, role: Role = "text_encoder", disk: bool = True) -> ManagedModel:
    """A unit around a CLIP encoder; with `disk` it can be read again."""
    if not disk:
        return ManagedModel.from_module(name, role, encoder(width))
    stored = encoder(width)

    def build() -> nn.Module:
        with torch.device("meta"):
            return encoder(width)

    def read() -> nn.Module:
        fresh = encoder(width)
        fresh.load_state_dict(stored.state_dict())
        return fresh

    return ManagedModel(name, role, build, read)


@pytest.fixture
def mgr(sim: ModuleType) -> MemoryManager:
    found = manager("sim")
    found.schedule(None)
    return found


def test_one_manager_for_each_device(mgr: MemoryManager) -> None:
    assert manager("sim") is manager("sim:0") is mgr
    assert manager("cpu") is not mgr


def test_lease_brings_the_unit_and_release_copies_nothing_back(mgr: MemoryManager, sim: ModuleType) -> None:
    a = unit("a")
    expected = None
    with mgr.use(a) as module:
        assert a.tier == "device"
        assert module.device == torch.device("sim:0")
        expected = module(tokens()).last_hidden_state.cpu()
    sim.reset_stats()
    freed = mgr.free()
    assert freed == on_device(a)
    assert sim.stats().d2h_bytes == 0
    assert sim.stats().allocated_bytes == 0
    assert a.tier == "host"
    with torch.inference_mode():
        torch.testing.assert_close(a.module(tokens("cpu")).last_hidden_state, expected)


def test_tiers_are_disk_host_device_and_back(mgr: MemoryManager) -> None:
    a = unit("a")
    mgr.adopt(a)
    assert a.tier == "disk"
    with mgr.use(a):
        assert (a.tier, a.resident_bytes, a.host_bytes) == ("device", on_device(a), a.size_bytes)
    mgr.free()
    assert (a.tier, a.resident_bytes, a.host_bytes) == ("host", 0, a.size_bytes)
    assert a.drop() == a.size_bytes
    assert (a.tier, a.host_bytes) == ("disk", 0)
    assert all(p.device.type == "meta" for p in a.module.parameters())
    with mgr.use(a) as module:
        assert module(tokens()).last_hidden_state.isfinite().all()


def test_tied_weights_count_and_move_once(mgr: MemoryManager, sim: ModuleType) -> None:
    t5 = T5EncoderModel(T5Config(vocab_size=500, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)).eval()
    a = ManagedModel.from_module("t5", "text_encoder", t5)
    with mgr.use(a) as module:
        assert sim.stats().allocated_bytes == on_device(a)
        assert module(tokens()).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("strategy", ["resident", "leafwise"])
def test_two_encoders_in_turn_twice_peak_at_the_larger(mgr: MemoryManager, sim: ModuleType, strategy: str) -> None:
    """diffusers' model offload leaves the last encoder on the device; called twice, its peak is the sum."""
    small, large = unit("small", 64), unit("large", 128)
    alone = 0
    for each in (small, large):
        with mgr.use(each, strategy, alone=True) as module:
            module(tokens())
        alone = max(alone, sim.stats().peak_bytes)
        mgr.free()
    sim.reset_stats()
    with mgr.stage("encode", [small, large], strategy):
        for _ in range(2):
            small.module(tokens())
            large.module(tokens())
    assert sim.stats().peak_bytes <= 1.02 * alone
    assert sim.stats().allocated_bytes == 0


def test_cap_below_the_unit_and_above_its_least_streams_it(mgr: MemoryManager, sim: ModuleType) -> None:
    a = unit("a", 128)
    with mgr.use(a) as module:
        expected = module(tokens()).last_hidden_state.cpu()
    mgr.free()
    sim.enable(total=sizes_of(a).least_streamed_bytes + mgr.work.working_bytes(a) + 20_000)
    assert on_device(a) > sim.stats().total_bytes
    with mgr.use(a) as module:
        assert a.placement is not None and a.placement.name == "streamed"
        torch.testing.assert_close(module(tokens()).last_hidden_state.cpu(), expected, atol=0, rtol=0)
    mgr.free()
    assert sim.stats().allocated_bytes == 0
    assert sim.stats().d2h_bytes == expected.nbytes + tokens().nbytes, "no weights, but the ids to look up"


def test_unit_that_fits_nowhere_says_what_it_wants(mgr: MemoryManager) -> None:
    a, held = unit("a", 256), unit("held", 64)
    with mgr.use(held):
        pass
    mgr.pin(held)
    mgr.limit(vram=sizes_of(a).least_streamed_bytes)
    with pytest.raises(DoesNotFitError) as caught, mgr.use(a):
        pass
    message = str(caught.value)
    assert "\n" not in message
    assert "a does not fit on sim:0" in message
    assert "budget" in message
    assert "held" in message
    assert a.tier == "disk" or a.placement is None
    assert a.leases == 0
    mgr.pin(held, False)


def test_pinned_units_stay_until_told_otherwise(mgr: MemoryManager) -> None:
    a, b = unit("a"), unit("b")
    mgr.pin(a)
    with mgr.use(a):
        pass
    with mgr.use(b, alone=True):
        assert a.tier == "device"
    mgr.free()
    assert (a.tier, b.tier) == ("device", "host")
    mgr.pin(a, False)
    mgr.free()
    assert a.tier == "host"


def test_leased_units_are_never_evicted(mgr: MemoryManager) -> None:
    a, b = unit("a"), unit("b")
    with mgr.use(a):
        mgr.free()
        assert a.tier == "device"
        mgr.limit(vram=on_device(a) + sizes_of(b).least_streamed_bytes + 200_000)
        with mgr.use(b):
            assert a.tier == "device"


def test_free_by_role_and_bytes(mgr: MemoryManager) -> None:
    units = [unit("e", role="text_encoder"), unit("t", role="transformer"), unit("v", role="vae")]
    for each in units:
        with mgr.use(each):
            pass
    assert mgr.free(["vae"]) == on_device(units[2])
    assert [u.tier for u in units] == ["device", "device", "host"]
    assert mgr.free(bytes=1) == on_device(units[0])
    assert [u.tier for u in units] == ["host", "device", "host"]
    with pytest.raises(ValueError, match="unknown roles"):
        mgr.free(["encoder"])  # type: ignore[list-item]


def test_budget_evicts_least_recently_used(mgr: MemoryManager) -> None:
    a, b, c = unit("a"), unit("b"), unit("c")
    mgr.limit(vram=5 * on_device(a) // 2)
    for each in (a, b, a, c):
        with mgr.use(each):
            pass
    assert [u.resident_bytes == on_device(u) for u in (a, b, c)] == [True, False, True]
    assert b.resident_bytes <= on_device(b) // 2


def test_budget_evicts_by_next_use_when_the_graph_is_known(mgr: MemoryManager) -> None:
    a, b, c = unit("a"), unit("b"), unit("c")
    mgr.limit(vram=5 * on_device(a) // 2)
    mgr.schedule([a, b, c, b, a])
    before = mgr.device_bytes_in
    for each in (a, b, c, b, a):
        with mgr.use(each):
            pass
    # Least recently used would have loaded two more, or what of them must leave; of these one comes back in part.
    assert 3 * on_device(a) < mgr.device_bytes_in - before < 4 * on_device(a)


@settings(max_examples=25)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.integers(100, 310))
def test_freed_bytes_are_what_the_device_lost(order: list[str], percent: int) -> None:
    from ballast.memory import simulated

    simulated.enable(total="4GB")
    mgr = manager("sim")
    mgr.schedule(None)
    units = {name: unit(name, 32) for name in "abc"}
    mgr.limit(vram=on_device(units["a"]) * percent // 100)
    for name in order:
        with mgr.use(units[name]):
            assert simulated.stats().allocated_bytes == sum(u.resident_bytes for u in units.values())
            assert simulated.stats().allocated_bytes <= mgr.budget_bytes
    held = simulated.stats().allocated_bytes
    assert mgr.free() == held
    assert simulated.stats().allocated_bytes == 0


def test_ram_budget_drops_host_copies_to_disk(mgr: MemoryManager) -> None:
    a, b = unit("a"), unit("b")
    mgr.limit(ram=a.size_bytes + a.size_bytes // 2)
    for each in (a, b):
        with mgr.use(each, alone=True):
            pass
        mgr.free()
    assert [u.tier for u in (a, b)] == ["disk", "host"]
    read = mgr.disk_bytes_read
    with mgr.use(a, alone=True) as module:
        assert module(tokens()).last_hidden_state.isfinite().all()
    assert mgr.disk_bytes_read == read + a.size_bytes


def test_unit_that_cannot_run_from_disk_is_refused_where_ram_is_too_small(mgr: MemoryManager) -> None:
    a = unit("a")
    mgr.limit(ram=a.size_bytes - 1)
    for strategy in ("auto", "resident", "streamed", "leafwise", "cpu"):
        refused = pytest.raises(DoesNotFitError, match="a does not fit in RAM: .* Raise the RAM budget")
        with refused, mgr.stage("encode", [a], strategy):
            a.module(tokens())
        assert (a.tier, a.host_bytes, a.leases) == ("disk", 0, 0)
    mgr.limit(ram=a.size_bytes)
    with mgr.stage("encode", [a]):
        a.module(tokens())
        assert a.host_bytes == a.size_bytes
    mgr.limit(ram=a.size_bytes - 1)
    with pytest.raises(DoesNotFitError), mgr.stage("encode", [a]):
        a.module(tokens())
    assert a.tier == "disk"


def test_unit_without_a_source_is_never_dropped(mgr: MemoryManager) -> None:
    a = unit("a", disk=False)
    mgr.limit(ram=1)
    with mgr.use(a):
        pass
    mgr.free()
    assert a.tier == "host"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, type("Interrupted", (BaseException,), {})])
def test_any_exception_leaves_nothing(mgr: MemoryManager, sim: ModuleType, error: type[BaseException]) -> None:
    a = unit("a")
    with pytest.raises(error), mgr.use(a) as module:
        kept = module(tokens())  # noqa: F841  (held by this very frame until the block ends)
        raise error("in mid-stage")
    del kept
    assert sim.stats().allocated_bytes == 0
    assert a.leases == 0
    with mgr.use(a) as module:
        assert module(tokens()).last_hidden_state.isfinite().all()


def test_out_of_memory_at_any_allocation_leaves_nothing(mgr: MemoryManager, sim: ModuleType) -> None:
    a = unit("a")
    with mgr.use(a) as module:
        expected = module(tokens()).last_hidden_state.cpu()
    mgr.free()
    failed = 0
    for count in range(1, 400, 13):
        try:
            with sim.fail_after(count), mgr.use(a, "resident") as module:
                module(tokens())
        except torch.OutOfMemoryError:
            failed += 1
        mgr.free()
        assert sim.stats().allocated_bytes == 0
        assert a.leases == 0
        given = tokens()
        with sim.fail_after(count), mgr.stage("encode", [a], "resident"):
            result = a.module(given).last_hidden_state.cpu()
        torch.testing.assert_close(result, expected, atol=0, rtol=0)
        del given
        assert sim.stats().allocated_bytes == 0
    assert failed > 5


def test_failing_to_load_leaves_the_disk_tier(mgr: MemoryManager) -> None:
    def read() -> nn.Module:
        raise OSError("the disk is gone")

    a = ManagedModel("a", "text_encoder", encoder, read)
    with pytest.raises(OSError, match="the disk is gone"), mgr.use(a):
        pass
    assert (a.tier, a.leases) == ("disk", 0)


class Hoarder(nn.Module):
    """Keeps tensors where `.to()` does not look, as rotary embeddings and causal VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.table = [torch.ones(4)]
        self.holder = type("Rope", (), {"__call__": lambda self: None})()
        self.features: dict[str, object] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table[0] = torch.ones(4, device=x.device)
        self.holder.cached = (torch.ones(3, device=x.device), "name")
        self.features["deep"] = {"list": [torch.ones(5, device=x.device)]}
        return self.proj(x)


def test_stray_tensors_leave_with_the_unit(mgr: MemoryManager, sim: ModuleType) -> None:
    a = ManagedModel.from_module("a", "transformer", Hoarder())
    for _ in range(2):
        with mgr.use(a) as module:
            module(torch.ones(1, 8, device="sim"))
        mgr.free()
        assert sim.stats().allocated_bytes == 0
    assert module.holder.cached[0].device.type == "cpu"
    assert module.holder.cached[1] == "name"


def test_dying_units_take_their_memory_along(mgr: MemoryManager, sim: ModuleType) -> None:
    a = unit("a")
    with mgr.use(a):
        pass
    ref = weakref.ref(a)
    del a
    gc.collect()
    assert ref() is None
    assert sim.stats().allocated_bytes == 0
    assert "a" not in [u.name for u in mgr.report().units]


def test_report_names_units_tiers_and_budget(mgr: MemoryManager) -> None:
    a = unit("a")
    mgr.limit(vram="1GB")
    with mgr.use(a):
        report = mgr.report()
        (mine,) = [u for u in report.units if u.name == "a"]
        assert (mine.tier, mine.placement, mine.leased, mine.resident_bytes) == (
            "device",
            "resident",
            True,
            on_device(a),
        )
        assert report.budget_bytes == 2**30
        assert report.resident_bytes == on_device(a)
        assert "1.00 GB" in str(report)
        assert "leased" in str(report)


def test_threads_take_turns(mgr: MemoryManager, sim: ModuleType) -> None:
    units = [unit(str(i), 32) for i in range(4)]
    errors: list[BaseException] = []

    def work(mine: ManagedModel) -> None:
        try:
            for _ in range(5):
                with mgr.use(mine) as module:
                    assert torch.is_inference_mode_enabled()
                    module(tokens())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in units]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    mgr.free()
    assert sim.stats().allocated_bytes == 0


def test_keep_in_fp32_and_other_dtypes_survive_every_tier(mgr: MemoryManager) -> None:
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=4).eval()
    vae.encoder.to(torch.bfloat16)
    before = {name: p.dtype for name, p in vae.named_parameters()}
    a = ManagedModel.from_module("vae", "vae", vae)
    for strategy in ("resident", "leafwise"):
        with mgr.use(a, strategy) as module:
            assert {name: p.dtype for name, p in module.named_parameters()} == before
        mgr.free()
    assert {name: p.dtype for name, p in vae.named_parameters()} == before


def test_transformer_runs_leafwise_with_top_level_parameters(mgr: MemoryManager) -> None:
    dit = Lumina2Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_attention_heads=3, num_kv_heads=1,
        multiple_of=16, axes_dim_rope=(4, 2, 2), axes_lens=(64, 16, 16), cap_feat_dim=8,
    ).eval()  # fmt: skip
    a = ManagedModel.from_module("dit", "transformer", dit)
    inputs = {
        "hidden_states": torch.randn(1, 4, 4, 4),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, 6, 8),
        "encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool),
    }
    with torch.inference_mode():
        expected = dit(**inputs).sample
    with mgr.use(a, "leafwise") as module:
        result = module(**{k: v.to("sim") for k, v in inputs.items()}).sample
        torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=0)


def test_twenty_runs_keep_memory_flat(mgr: MemoryManager, sim: ModuleType) -> None:
    a, b = unit("a"), unit("b", 128)
    process = psutil.Process()
    sizes = []
    for _ in range(20):
        with mgr.stage("encode", [a, b]):
            a.module(tokens())
            b.module(tokens())
        gc.collect()
        assert sim.stats().allocated_bytes == 0
        sizes.append(process.memory_info().rss)
    assert max(sizes[5:]) <= 1.02 * min(sizes[5:])


def test_a_stage_strikes_each_of_its_units_once(mgr: MemoryManager) -> None:
    """The graph counts stages, not calls: a transformer is called at every step."""
    dit, vae, enc = unit("dit"), unit("vae"), unit("enc")
    mgr.schedule([dit, vae, enc, dit, vae])
    with mgr.stage("sample", [dit]):
        for _ in range(3):
            dit.module(tokens())
    assert [use.unit for use in mgr._residency.schedule.uses(mgr.work.working_bytes) or []] == [vae, enc, dit, vae]


def test_the_host_is_asked_for_room_before_the_choice(mgr: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle model of the host must not make ours run leafwise."""
    from ballast.memory import simulated
    from ballast.memory.host import management as host

    a = unit("a")
    simulated.enable(total=2 * a.size_bytes)
    idle = [torch.empty(a.size_bytes + a.size_bytes // 2, dtype=torch.uint8, device="sim")]
    asked = []

    def evict_host_models(wanted_bytes: int, wanted_on: torch.device, coming: list[Role]) -> None:
        asked.append((wanted_bytes, coming))
        idle.clear()

    monkeypatch.setattr(host, "evict_host_models", evict_host_models)
    mgr.schedule([a], ["vae"])
    with mgr.use(a):
        assert a.placement is not None
        assert a.placement.name == "resident"
    assert asked[0] == (on_device(a), ["vae"])
    mgr.schedule(None)
    assert mgr.budget.host_roles is None


def test_timeline_is_drawn_whatever_ran(mgr: MemoryManager) -> None:
    empty = mgr.timeline.picture(400, 200)
    a = unit("a")
    with mgr.stage("encode", [a]):
        a.module(tokens())
    drawn = mgr.timeline.picture(400, 200)
    on_cpu = manager("cpu")
    with on_cpu.stage("encode", [a]):
        a.module(tokens("cpu"))
    assert empty.size == drawn.size == on_cpu.timeline.picture(400, 200).size == (400, 200)
    colours = {colour for _, colour in drawn.getcolors(1 << 16) or []}
    assert (0x25, 0x63, 0xEB) in colours, "the encoder's weights"
    assert "encode" in mgr.timeline.table()
    mgr.timeline.clear()
