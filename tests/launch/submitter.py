"""Submits runs from a process of its own, as any user: prints the result as one JSON object.

`python -m tests.launch.submitter RUNS_DIR NUMBER OPTIONS [SUBMISSION_ID]`, OPTIONS in JSON for
`making.spec`; NUMBER 0 resumes the submission instead.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from air_hpc.errors import AirHpcError
from air_hpc.launch.submission import submission_dir
from air_hpc.launch.submit import resume_submission, submit
from tests.launch import making


def main() -> int:
    runs_dir, number, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    submission_id = sys.argv[4] if len(sys.argv) > 4 else None
    began = time.monotonic()
    try:
        if number:
            tasks = making.tasks(runs_dir, number, **options)
            began = time.monotonic()
            result = submit(tasks, submission_id=submission_id)
        else:
            result = resume_submission(submission_dir(runs_dir, str(submission_id)))
    except AirHpcError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    took_s = time.monotonic() - began
    print(json.dumps({**asdict(result), "took_s": took_s}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
