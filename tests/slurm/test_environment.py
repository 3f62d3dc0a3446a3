from air_hpc.slurm.environment import for_parsing, scrubbed, user_defaults

INSIDE = {
    "PATH": "/usr/bin",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_JOB_ID": "7",
    "SBATCH_EXPORT": "NONE",
    "SRUN_CPUS_PER_TASK": "4",
    "SQUEUE_FORMAT": "%i",
    "SACCT_FORMAT": "JobID",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JWT": "token",
    "SLURM_CONF_SERVER": "host",
}


def test_another_jobs_options_do_not_reach_our_commands() -> None:
    kept = scrubbed(INSIDE)
    assert set(kept) == {"PATH", "SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}


def test_parsed_output_is_in_the_c_locale() -> None:
    assert for_parsing({"LC_ALL": "de_DE.UTF-8"})["LC_ALL"] == "C"


def test_a_users_sbatch_defaults_become_launch_keys_and_empty_ones_do_not() -> None:
    found = user_defaults({"SBATCH_ACCOUNT": "research", "SBATCH_PARTITION": "", "SBATCH_X": "1"})
    assert found == {"account": "research"}
