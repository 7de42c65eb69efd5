"""The paged pool and what moves in it: frames, page table, planner, migration."""
