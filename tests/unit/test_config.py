"""Where a setting comes from, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from mirror_sd.config import Config, load
from mirror_sd.errors import ConfigError
from mirror_sd.run_dir import RunDir, from_run_dir

ROOT = Path(__file__).resolve().parents[2]


def written(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_default() -> None:
    assert load(environ={}) == Config()


def test_commented_file_in_ops_states_every_key_and_its_default() -> None:
    path = ROOT / "ops" / "config.yaml"
    assert load(path, environ={}) == Config()
    assert keys(yaml.safe_load(path.read_text(encoding="utf-8"))) == keys(Config().model_dump())


def keys(tree: dict[str, object]) -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        found |= {name} if not isinstance(value, dict) else {f"{name}.{k}" for k in keys(value)}
    return found


def test_every_key_has_a_description() -> None:
    def undescribed(section: type[BaseModel]) -> list[str]:
        return [name for name, field in section.model_fields.items() if not field.description]

    sections = ("server", "model", "engine", "speculation", "broker")
    for name in sections:
        assert undescribed(type(getattr(Config(), name))) == [], name


@pytest.mark.parametrize(
    ("in_file", "in_environment", "on_the_command_line", "port"),
    [
        (None, None, None, 8080),
        (1111, None, None, 1111),
        (1111, 2222, None, 2222),
        (1111, 2222, 3333, 3333),
        (1111, None, 3333, 3333),
        (None, 2222, None, 2222),
    ],
)
def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path,
    in_file: int | None,
    in_environment: int | None,
    on_the_command_line: int | None,
    port: int,
) -> None:
    file = written(tmp_path, f"server: {{port: {in_file}}}") if in_file else None
    environ = {"MIRROR_SD__SERVER__PORT": str(in_environment)} if in_environment else {}
    flags = [f"server.port={on_the_command_line}"] if on_the_command_line else []
    assert load(file, flags, environ).server.port == port


def test_sources_are_merged_key_by_key(tmp_path: Path) -> None:
    file = written(tmp_path, "server: {port: 1111, gateways: 3}")
    config = load(file, ["engine.block_size=32"], {"MIRROR_SD__SERVER__PORT": "2222"})
    assert (config.server.port, config.server.gateways, config.engine.block_size) == (2222, 3, 32)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pools.cpu.precision=fp32", "fp32"),
        ("pools.cpu.precision='fp32'", "fp32"),
    ],
)
def test_values_are_yaml(setting: str, value: str) -> None:
    assert load(overrides=[setting], environ={}).pools["cpu"].precision == value


def test_class_of_devices_is_upper_case_in_the_scheduler_and_lower_in_the_environment() -> None:
    environ = {"MIRROR_SD__SCHEDULER__MAX_BATCH_SIZE__CPU": "5"}
    assert load(environ=environ).scheduler.max_batch_size.of("cpu") == 5


def test_a_pool_named_by_a_flag_or_the_environment_stands_beside_the_default_one() -> None:
    config = load(overrides=["pools.gpu.engine=emulated"], environ={"MIRROR_SD__POOLS__TPU": "{}"})
    assert sorted(config.pools) == ["cpu", "gpu", "tpu"]
    assert config.pools["cpu"].engine == "auto"
    assert config.pools["gpu"].engine == "emulated"


def test_an_int8_cache_with_an_engine_that_has_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"kv_precision is int8.*pools\.cpu\.engine is torch"):
        load(overrides=["engine.kv_precision=int8", "pools.cpu.engine=torch"], environ={})


def test_the_admin_port_follows_the_port_unless_it_is_given() -> None:
    ports = [
        load(overrides=flags, environ={}).server.effective_admin_port
        for flags in ([], ["server.port=65000"], ["server.admin_port=7"])
    ]
    assert ports == [9080, 64000, 7]


def test_pool_without_settings_has_the_defaults(tmp_path: Path) -> None:
    config = load(written(tmp_path, "pools:\n  gpu:\n"), environ={})
    assert list(config.pools) == ["gpu"]
    assert config.pools["gpu"].workers == 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.port=0", ("server.port", "0", "greater than or equal to 1")),
        ("server.port=web", ("server.port", "'web'", "integer")),
        ("server.prot=1", ("server.prot", "no such key")),
        ("sever.port=1", ("sever", "no such key")),
        ("pools.cpu.precision=int3", ("pools.cpu.precision", "'int3'", "'fp32'", "'bf16'")),
        ("pools.npu.workers=1", ("pools.npu", "'cpu'", "'gpu'", "'tpu'")),
        ("speculation.min_tokens=17", ("speculation", "min_tokens is 17", "which is 16")),
        ("speculation.ngram_min=5", ("speculation", "ngram_min is 5", "ngram_max, which is 4")),
        ("broker.fallback_s=.inf", ("broker.fallback_s", "inf", "finite")),
        ("server.start_timeout_s=.nan", ("server.start_timeout_s", "nan", "finite")),
        ("probe.webhook=foo", ("probe.webhook", "'foo'", "http or https URL")),
        ("probe.webhook=http://", ("probe.webhook", "http or https URL")),
        ("server.drain_s=-1", ("server.drain_s", "-1", "greater than or equal to 0")),
        ("server", ("--set", "key.sub=value")),
        ("=1", ("--set", "key.sub=value")),
        ("server.port.x=1", ("server.port",)),
        ("server.port=[", ("server.port", "YAML")),
    ],
)
def test_bad_setting_is_told_by_key_value_and_what_is_allowed(
    setting: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(overrides=[setting], environ={})
    for word in words:
        assert word in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "word"),
    [("- a list", "mapping"), ("a: [", "YAML"), ("server: 5", "server"), ("server: {x: 1}", "x")],
)
def test_bad_file_is_told_in_one_line(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(written(tmp_path, text), environ={})
    assert word in raised.value.message
    assert "\n" not in raised.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load(tmp_path / "nowhere.yaml", environ={})


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(written(tmp_path, ""), environ={}) == Config()


def test_child_reads_back_what_the_supervisor_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_config = load(overrides=["server.port=9", "pools.gpu.workers=2"], environ={})
    run = RunDir(tmp_path)
    run.config_json.write_text(written_config.model_dump_json(), encoding="utf-8")
    monkeypatch.setenv("MIRROR_SD_CONFIG_JSON", str(run.config_json))
    config, found = from_run_dir()
    assert config == written_config
    assert found.path == tmp_path


def test_child_without_a_run_directory_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MIRROR_SD_CONFIG_JSON", raising=False)
    with pytest.raises(ConfigError, match="mirror-sd up"):
        from_run_dir()


def test_history_alone_without_room_for_any_is_refused() -> None:
    nothing = ["speculation.drafter=history", "speculation.history_tokens=0"]
    with pytest.raises(ConfigError, match="drafter is history, and history_tokens is 0"):
        load(overrides=nothing, environ={})
    assert load(overrides=nothing[1:], environ={}).speculation.drafter == "auto"
