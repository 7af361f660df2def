"""The traps of the formats, and the test that falls into each of them."""

import re
from pathlib import Path

import pytest

# What goes wrong in an importer that does not know better -> where it is tested.
TRAPS = {
    "Minari: an episode lies in batches of 32,768 rows": (
        "minari_tables",
        "test_an_episode_in_several_batches_stays_one",
    ),
    "Minari: images that are all equally long are a plain array of bytes": (
        "minari",
        "test_jpeg_images_are_decoded_as_minari_does",
    ),
    "Minari: a vector of bytes is no image": ("minari", "test_a_vector_of_bytes_is_no_image"),
    "LeRobot: the tables have gaps after a crash": (
        "lerobot",
        "test_rows_are_found_by_their_number_where_the_table_has_gaps",
    ),
    "LeRobot: files without a footer": (
        "lerobot",
        "test_a_recording_that_was_killed_is_refused_with_what_is_missing",
    ),
    "D4RL: rewards and flags of shape (N, 1)": (
        "d4rl",
        "test_columns_of_one_become_scalars_and_the_report_says_so",
    ),
    "d3rlpy: rewards of shape (T, 1)": ("d3rlpy", "test_what_d3rlpy_wrote_arrives_byte_for_byte"),
    "D4RL: the last episode has no end": (
        "d4rl",
        "test_rows_arrive_byte_for_byte_and_the_last_ones_are_incomplete",
    ),
    "D4RL: both flags are set": ("d4rl", "test_both_flags_end_as_terminated_and_stay_both"),
    "Minari: both flags are set": ("minari", "test_both_flags_end_as_terminated_and_stay_both"),
    "D4RL: no timeouts": ("d4rl", "test_without_timeouts_the_limit_is_asked_for_by_name"),
    "robomimic: what dones mean": ("robomimic", "test_the_meaning_of_dones_is_asked_for_by_name"),
    "OGBench: the last action has no result": (
        "ogbench",
        "test_the_last_row_is_the_final_observation_and_its_action_is_left_out",
    ),
    "diffusion_policy: rows after the last end": (
        "diffusion_policy",
        "test_rows_after_the_last_end_are_dropped_and_counted",
    ),
    "RLDS: the row with is_last has no action": (
        "rlds",
        "test_the_row_with_is_last_is_the_final_observation",
    ),
    "RLlib: an episode is written again": (
        "rllib",
        "test_an_episode_that_was_written_twice_is_imported_once",
    ),
    "TorchRL: a ring wraps inside an episode": (
        "torchrl",
        "test_a_ring_that_wraps_inside_an_episode_starts_with_its_oldest_row",
    ),
    "Stable-Baselines3: a ring wraps inside an episode": (
        "sb3",
        "test_a_ring_that_wraps_inside_an_episode_starts_with_its_oldest_row",
    ),
    "Tianshou: a ring wraps inside an episode": (
        "tianshou",
        "test_rings_that_wrap_inside_an_episode_start_with_their_oldest_row",
    ),
    "Dopamine: a ring wraps inside an episode, and rows of padding": (
        "dopamine",
        "test_checkpoints_of_one_ring_are_read_as_one_stream",
    ),
    "Stable-Baselines3: a pickle runs code": (
        "sb3",
        "test_a_planted_payload_does_not_run_without_trust",
    ),
    "Dreamer: an action belongs to the previous observation": (
        "dreamer",
        "test_an_action_belongs_to_the_previous_observation",
    ),
    "DreamerV3: only the reward is shifted": ("dreamer", "test_chunks_shift_the_reward_by_one"),
    "V-D4RL: an action belongs to the previous observation": (
        "vd4rl",
        "test_an_action_belongs_to_the_previous_observation",
    ),
    "Flashbax: only rows before vault_index": (
        "flashbax",
        "test_what_flashbax_wrote_arrives_byte_for_byte",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_a_test(trap: str) -> None:
    module, name = TRAPS[trap]
    source = (Path(__file__).parent / f"test_{module}.py").read_text()
    assert re.search(rf"^def {name}\(", source, re.MULTILINE)
