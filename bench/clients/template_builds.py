"""Builds templates with E2B's SDK: prints a line of JSON with the seconds of each build.

    template_builds.py NAME COUNT STEPS START READY FORCED

Builds NAME from `base` COUNT times, with STEPS steps that do nothing, and the start and ready
command unless they are empty. FORCED: the steps run each time; otherwise they differ by no run, so
all builds but the first are cached.
"""

import json
import sys
import time

from e2b import Template

name, count, steps, start, ready, forced = sys.argv[1:]
seconds = []
for _ in range(int(count)):
    template = Template().from_image("base")
    if forced == "yes":
        template = template.skip_cache()
    for number in range(int(steps)):
        template = template.run_cmd(f"true # {number}")
    final = template.set_start_cmd(start, ready) if start else template
    began = time.perf_counter()
    Template.build(final, name, cpu_count=1, memory_mb=512)
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds))
