"""What the Linux kernel does for isolation.

syscalls     system calls that Python 3.10 does not have
mounts       what is mounted where
landlock     refuses writes outside of some folders
seccomp      holds system calls of an attempt until the keeper has judged them
"""
