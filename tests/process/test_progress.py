"""What a handler says of its progress reaches the job's row with a renewal, although it is said only once."""

from tests.fixtures.processes import wait_until


def test_what_was_said_while_the_row_was_locked_is_stored_afterwards(start_daemon, jobs, tmp_path):
    gates = [tmp_path / name for name in ("first", "second")]
    end, said = tmp_path / "end", tmp_path / "said"
    start_daemon({"daemon": {"lease_s": 20.0, "renew_s": 0.2}})
    job, sibling = (
        jobs.add(
            [{"wait_file": str(gate)}, {"progress": 33}, {"touch": str(said)}, {"wait_file": str(end)}],
        )
        for gate in gates
    )
    wait_until(lambda: jobs.state(job) == jobs.state(sibling) == "PROCESSING")
    with jobs.conn.transaction():
        jobs.conn.execute("select from aqd.jobs where id = %s for update", [job])
        gates[0].touch()
        wait_until(said.exists)
        gates[1].touch()
        # Said later, stored: by then it was tried with the other one, too.
        wait_until(lambda: jobs.get(sibling)["progress_percent"] == 33)
        assert jobs.get(job)["progress_percent"] is None
    wait_until(lambda: jobs.get(job)["progress_percent"] == 33)
    end.touch()
    assert jobs.wait_all([job, sibling]) == {"COMPLETED": 2}
