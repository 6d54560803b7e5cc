"""One-step policies under lerobot's real-time chunking, and behind its policy server on this machine."""

import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from patience import HANG_S
from torch import Tensor

configuration_rtc = LateModule("lerobot.policies.rtc.configuration_rtc")
feature_utils = LateModule("lerobot.utils.feature_utils")
model_card = LateModule("hf_memopt.lerobot.student.model_card")
policies = LateModule("lerobot.policies")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")
robot_wrapper = LateModule("lerobot.rollout.robot_wrapper")
rtc_inference = LateModule("lerobot.rollout.inference.rtc")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
toy_arm = LateModule("toy_arm")

HORIZON, DELAY = 4, 2  # actions of the chunk before that guide, and of these the ones that the robot executes meanwhile


@pytest.fixture(scope="module")
def exported(toy_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock policy that takes one step. Read only."""
    folder = tmp_path_factory.mktemp("exported") / "policy"
    return Path(prepare.export_student(str(toy_student), folder, 1, ""))


@pytest.fixture(params=["exported", "toy_student"])
def one_step(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def load(folder: Path, **settings: Any) -> Any:
    """Load a policy for one step as lerobot-rollout does, with its settings of real-time chunking."""
    config = policy_files.load_config(folder)
    config.num_steps = 1
    policy = policies.get_policy_class(config.type).from_pretrained(folder, config=config)
    policy.config.rtc_config = configuration_rtc.RTCConfig(execution_horizon=HORIZON, **settings)
    policy.init_rtc_processor()
    return policy.eval()


def chunks(policy: Any, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk of nothing before, the actions left over from another, and the chunk that these guide."""
    preprocess, _ = processors.load_processors(policy.config, folder, {"device_processor": {"device": "cpu"}})
    observation = processors.blank_observation(policy.config, preprocess)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, policy.config.chunk_size, policy.config.max_action_dim, generator=generator)
    left_over = torch.randn(HORIZON, 2, generator=generator)
    plain = policy.predict_action_chunk(dict(observation), noise=noise)
    guided = policy.predict_action_chunk(
        dict(observation), noise=noise, inference_delay=DELAY, prev_chunk_left_over=left_over
    )
    return plain[0], left_over, guided[0]


def test_a_guidance_weight_of_one_continues_the_chunk_before_exactly(one_step: Path) -> None:
    plain, left_over, guided = chunks(load(one_step, max_guidance_weight=1.0), one_step)
    # Rounding: the correction is added to a velocity and comes back by an Euler step.
    torch.testing.assert_close(guided[:DELAY], left_over[:DELAY], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(guided[HORIZON:], plain[HORIZON:], rtol=1e-5, atol=1e-5)


def test_lerobots_default_weight_overshoots_tenfold_in_one_step(one_step: Path) -> None:
    plain, left_over, guided = chunks(load(one_step), one_step)
    corrected = plain[:DELAY] + 10 * (left_over[:DELAY] - plain[:DELAY])
    torch.testing.assert_close(guided[:DELAY], corrected, rtol=1e-4, atol=1e-4)


def test_lerobots_engine_chunks_in_real_time(one_step: Path) -> None:
    policy = load(one_step, max_guidance_weight=1.0)
    assert rtc_inference.supports_rtc_inference(policy)
    robot = toy_arm.ToyArm(toy_arm.ToyArmConfig())
    engine = rtc_inference.RTCInferenceEngine(
        policy,
        *processors.load_processors(policy.config, one_step, {"device_processor": {"device": "cpu"}}),
        robot_wrapper.ThreadSafeRobot(robot),
        policy.config.rtc_config,
        feature_utils.hw_to_dataset_features(robot.observation_features, "observation", use_video=False),
        toy.TASK,
        fps=0.1,  # so slow that a chunk's delay is one action on any machine
        device="cpu",
        rtc_queue_threshold=HORIZON,
    )
    engine.start()
    engine.notify_observation(robot.get_observation())
    engine.resume()
    actions, deadline = [], time.monotonic() + HANG_S
    try:
        while len(actions) < 2 * policy.config.chunk_size and not engine.failed and time.monotonic() < deadline:
            action = engine.get_action(None)
            if action is None:
                time.sleep(0.01)
            else:
                actions.append(action)
    finally:
        engine.stop()
    assert not engine.failed
    assert len(actions) == 2 * policy.config.chunk_size
    assert all(action.shape == (2,) and action.isfinite().all() for action in actions)


@pytest.mark.parametrize(("num_steps", "weight"), [(1, 1.0), (2, 2.0), (20, 10.0)])
def test_an_exported_policy_asks_for_as_much_guidance_as_it_has_steps(
    num_steps: int, weight: float, toy_student: Path, tmp_path: Path
) -> None:
    chunking = Path(shutil.copytree(toy_student, tmp_path / "chunking"))
    config = policy_files.load_config(chunking)
    config.rtc_config = configuration_rtc.RTCConfig(execution_horizon=HORIZON)
    config.save_pretrained(chunking)
    exported = policy_files.load_config(prepare.export_student(str(chunking), tmp_path / "exported", num_steps, ""))
    assert exported.rtc_config == configuration_rtc.RTCConfig(execution_horizon=HORIZON, max_guidance_weight=weight)


def test_the_card_names_the_guidance(toy_student: Path) -> None:
    assert "`--inference.type=rtc --inference.rtc.max_guidance_weight=2`" in model_card.write_card(
        str(toy_student), 2, None
    )


def test_lerobot_selects_no_single_actions_in_real_time_chunks(one_step: Path) -> None:
    with pytest.raises(AssertionError, match="RTC is not supported for select_action"):
        load(one_step).select_action({})


# ------------------------------------------------------------------------------------------------ the policy server


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of lerobot's asynchronous inference, which set up the whole process's logging when they load."""
    pytest.importorskip("grpc", reason="lerobot's extra 'async' is not installed")
    from lerobot.async_inference import helpers

    monkeypatch.setattr(helpers, "init_logging", lambda **_: None)
    from lerobot.async_inference import configs, policy_server, robot_client

    return {"configs": configs, "server": policy_server, "client": robot_client, "helpers": helpers}


@pytest.fixture
def address(asynchronous: Any) -> Iterator[str]:
    """The loopback address of a policy server in this process."""
    import grpc

    servicer = asynchronous["server"].PolicyServer(asynchronous["configs"].PolicyServerConfig(inference_latency=0))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    asynchronous["server"].services_pb2_grpc.add_AsyncInferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    servicer.stop()
    server.stop(grace=None).wait(HANG_S)


def make_client(asynchronous: Any, address: str, policy: Path, kind: str, num_actions: int = 1) -> Any:
    config = asynchronous["configs"].RobotClientConfig(
        policy_type=kind,
        pretrained_name_or_path=str(policy),
        robot=toy_arm.ToyArmConfig(num_actions=num_actions),
        actions_per_chunk=toy.PATH_STEPS,
        task=toy.TASK,
        server_address=address,
    )
    return asynchronous["client"].RobotClient(config)


def test_lerobots_policy_server_moves_a_robot_with_an_exported_policy(
    asynchronous: Any, address: str, exported: Path
) -> None:
    client = make_client(asynchronous, address, exported, "smolvla", num_actions=2 * toy.PATH_STEPS)
    assert client.start()
    threads = [
        threading.Thread(target=client.receive_actions),
        threading.Thread(target=client.control_loop, args=(toy.TASK,)),
    ]
    for thread in threads:
        thread.start()
    moved = client.robot.moved.wait(HANG_S)
    client.shutdown_event.set()
    for thread in threads:
        thread.join(HANG_S)
    client.stop()
    assert moved
    assert all(set(action) == set(toy_arm.AXES) for action in client.robot.actions)


def test_a_served_chunk_is_the_policys_own(asynchronous: Any, address: str, exported: Path) -> None:
    client = make_client(asynchronous, address, exported, "smolvla")
    assert client.start()
    raw = {**client.robot.get_observation(), "task": toy.TASK}
    helpers = asynchronous["helpers"]
    assert client.send_observation(helpers.TimedObservation(time.time(), 0, raw, must_go=True))
    torch.manual_seed(0)  # the server samples in this process
    served = pickle.loads(client.stub.GetActions(asynchronous["client"].services_pb2.Empty()).data)
    client.stop()
    policy = load(exported, enabled=False)
    preprocess, postprocess = processors.load_processors(
        policy.config, exported, {"device_processor": {"device": "cpu"}}
    )
    observation = helpers.raw_observation_to_observation(
        raw, client.policy_config.lerobot_features, policy.config.image_features
    )
    torch.manual_seed(0)
    own = postprocess(policy.predict_action_chunk(preprocess(observation)))
    assert torch.equal(torch.stack([timed.get_action() for timed in served]), own[0])


def test_lerobots_policy_server_takes_no_student(asynchronous: Any, address: str, toy_student: Path) -> None:
    assert "smolvla_reflow" not in asynchronous["server"].SUPPORTED_POLICIES
    client = make_client(asynchronous, address, toy_student, "smolvla_reflow")
    assert not client.start()
    client.stop()
