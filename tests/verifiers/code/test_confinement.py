"""What a hostile program tries, and that the test would notice: each guard switched off opens its hole."""

from __future__ import annotations

import contextlib
import os
import socket
import textwrap
from pathlib import Path

import psutil
import pytest

from magicrl.verifiers.code.judge import CodeJudge
from magicrl.verifiers.code.suite import parse_suite

from .conftest import judge_of


def holes(judge: CodeJudge, attempts: dict[str, str]) -> set[str]:
    """The names of the attempts that did not raise."""
    body = ["import os, sys, socket, ctypes, signal", "libc = ctypes.CDLL(None, use_errno=True)", "open_holes = []"]
    for name, code in attempts.items():
        body += ["try:", textwrap.indent(textwrap.dedent(code), "    "), f"    open_holes.append({name!r})"]
        body += ["except BaseException: pass"]
    body += ["print(' '.join(open_holes))"]
    (output,) = judge.outputs("\n".join(body), parse_suite({"inputs": [""], "outputs": [""]}))
    assert output is not None, "the program itself failed"
    return set(output.decode().split())


def denied(number: int, *arguments: int) -> str:
    listed = ", ".join(map(str, (number, *arguments)))
    return f"if libc.syscall({listed}) < 0: raise OSError"


def test_reads_nothing_outside_its_list(tiered: CodeJudge, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("expected output")
    paths = {"secret": secret, "passwd": "/etc/passwd", "shadow": "/etc/shadow", "tests": __file__}
    paths |= {"environ": "/proc/1/environ", "parent": "/proc/self/environ", "root": "/root/.bashrc"}
    attempts = {name: f"open({str(path)!r}, 'rb').read()" for name, path in paths.items()}
    attempts |= {f"list_{i}": f"os.listdir({path!r})" for i, path in enumerate(("/", "/proc", "/home", str(tmp_path)))}
    attempts["memory"] = "open(f'/proc/{os.getppid()}/mem', 'rb').seek(4096)"
    assert holes(tiered, attempts) == set()


def test_changes_nothing_on_the_machine(tiered: CodeJudge, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    mode = kept.stat().st_mode
    path = str(kept)
    attempts = {
        "write": f"open({path!r}, 'w').write('y')",
        "make": f"open({str(tmp_path / 'new')!r}, 'w')",
        "remove": f"os.remove({path!r})",
        "chmod": f"os.chmod({path!r}, 0o777)",
        "chown": f"os.chown({path!r}, 1, 1)",
        "utime": f"os.utime({path!r}, (1, 1))",
        "truncate": f"os.truncate({path!r}, 0)",
        "link": f"os.link({path!r}, '/tmp/hard')",
        "symlink": "os.symlink('/etc/passwd', '/tmp/soft')",
        "fifo": "os.mkfifo('/tmp/fifo')",
        "home": "open('/root/planted', 'w')",
        "shm": "open('/dev/shm/planted', 'w')",
    }
    assert holes(tiered, attempts) == set()
    assert (kept.read_text(), kept.stat().st_mode) == ("x", mode)
    assert list(tmp_path.iterdir()) == [kept]


def test_has_no_network(tiered: CodeJudge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempts = {
            "tcp": f"socket.create_connection(('127.0.0.1', {port}), timeout=1)",
            "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
            "listen": "socket.socket().bind(('127.0.0.1', 0))",
            "unix": "socket.socket(socket.AF_UNIX).bind(chr(0) + 'planted')",
            "datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            "netlink": "socket.socket(16, 3, 0)",
        }
        assert holes(tiered, attempts) == set()


def test_starts_nothing_and_reaches_no_process(tiered: CodeJudge) -> None:
    attempts = {
        "fork": "if os.fork() == 0: os._exit(0)",
        "vfork": denied(58),
        "clone": denied(56, 17, 0, 0, 0, 0),
        "exec": "os.execv('/bin/true', ['true'])",
        "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
        "system": "if os.system('true') != 0: raise OSError",
        "kill_parent": "os.kill(os.getppid(), 0)",
        "kill_all": "os.kill(-1, 0)",
        "kill_group": "os.kill(0, 0)",
        "kill_one": "os.kill(2 if os.getpid() == 1 else 1, 0)",
        "affinity": "os.sched_setaffinity(os.getppid() or 2, {0})",
        "priority": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
        "limits": "import resource; resource.prlimit(os.getppid() or 2, resource.RLIMIT_CPU, (1, 1))",
        "cpu_limit": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "owner": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 8, 1)",
        "memfd": "os.memfd_create('x')",
        "shmget": denied(29, 0, 4096, 0o1000),
        "setuid": "os.setuid(0 if os.getuid() else 1)",
    }
    assert holes(tiered, attempts) == set()


@pytest.mark.parametrize(
    "call",
    ["unshare", "ptrace", "bpf", "mount", "setns", "process_vm_readv", "pidfd_open", "io_uring_setup", "init_module"],
)
def test_calls_that_only_attacks_make_end_the_program(tiered: CodeJudge, call: str) -> None:
    numbers = {"unshare": 272, "ptrace": 101, "bpf": 321, "mount": 165, "setns": 308, "process_vm_readv": 310}
    numbers |= {"pidfd_open": 434, "io_uring_setup": 425, "init_module": 175}
    program = f"print(1, flush=True)\nimport ctypes\nctypes.CDLL(None).syscall({numbers[call]}, 0, 0, 0, 0, 0)"
    verdict = tiered.judge_program(program, parse_suite({"inputs": [""], "outputs": ["1"]}))
    assert verdict.status == "security"


def test_holds_no_descriptor_and_no_secret(tiered: CodeJudge) -> None:
    """No expected output in its memory, no descriptor but its three, nothing in its environment."""
    program = """
        import gc, os, sys
        fds = []
        for fd in range(3, 300):
            try: os.fstat(fd); fds.append(fd)
            except OSError: pass
        found = [o for o in gc.get_objects() if isinstance(o, (dict, list)) and "needle-4711" in str(o)[:100000]]
        frame, names = sys._getframe(), []
        while frame:
            names += [n for n, v in frame.f_locals.items() if "needle-47" + "11" in str(v)[:100000]]
            frame = frame.f_back
        print(fds, len(found), names, sorted(set(os.environ) - {"PATH", "HOME", "LANG", "PYTHONHASHSEED"}), sys.argv)
    """
    program = textwrap.dedent(program).replace('"needle-4711"', '"needle-47" + "11"')
    os.environ["MAGICRL_TEST_SECRET"] = "needle-4711"
    try:
        (output,) = tiered.outputs(program, parse_suite({"inputs": [""], "outputs": ["needle-4711"]}))
    finally:
        del os.environ["MAGICRL_TEST_SECRET"]
    assert output is not None
    threads = ["MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert output.decode() == f"[] 0 [] {threads} ['main.py']\n"


def test_nothing_is_left_running_when_the_judge_is_closed() -> None:
    before = set(psutil.Process().children(recursive=True))
    judge = judge_of("auto")
    suite = parse_suite({"test_code": "for i in range(2):\n    assert f(i) == i"})
    assert judge.judge_program("def f(x): return x", suite).correct
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) >= 2
    judge.close()
    assert not any(process.is_running() and process.status() != "zombie" for process in started)


def test_an_opened_guard_is_noticed() -> None:
    """Tier A without one of its guards: what the guard holds gets through, so the tests above can fail."""
    attempts = {
        "read": "open('/etc/passwd').read()",
        "socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "signal": "os.kill(os.getppid(), 0)",
    }
    with judge_of("A") as closed:
        assert holes(closed, attempts) == set()
    with judge_of("A", "landlock") as opened:
        assert holes(opened, attempts) == {"read"}
    with judge_of("A", "seccomp") as opened:
        assert "socket" in holes(opened, attempts)
    with judge_of("A", "seccomp", "landlock") as opened:
        assert holes(opened, attempts) == set(attempts)


def test_process_numbers_are_its_own_in_tier_b() -> None:
    program = "import os\nprint(os.getpid(), os.getppid(), os.listdir('/tmp'))"
    with judge_of("B") as judge:
        if judge.sandbox.tier != "B":
            pytest.skip("kernel lacks the primitive: namespaces")
        assert judge.outputs(program, parse_suite({"inputs": [""], "outputs": [""]})) == [b"1 0 []\n"]


def test_every_test_in_tier_b_has_an_empty_scratch_folder_of_its_own() -> None:
    program = "import os\nprint(os.listdir('/tmp'))\nos.makedirs('a/b')\nopen('/tmp/a/b/c', 'w').write('x')"
    with judge_of("B") as judge:
        outputs = judge.outputs(program, parse_suite({"inputs": [""] * 4, "outputs": [""] * 4}))
    assert outputs == [b"[]\n"] * 4


def test_nothing_passes_from_test_to_test_in_a_batch(tiered: CodeJudge) -> None:
    """After the first test that passes they run in batches: no descriptor of another is there, no file keeps state."""
    program = """
    import fcntl, os, sys
    def there(fd):
        try: return bool(os.fstat(fd))
        except OSError: return False
    print([fd for fd in range(3, 400) if there(fd)], os.lseek(2, 0, 1), os.fstat(2).st_size, fcntl.fcntl(2, 3) & 0o6000,
          os.lseek(0, 0, 1), len(sys.stdin.read()), os.fstat(1).st_size)
    os.write(2, b"x" * 100)
    os.lseek(2, 7, 0)
    fcntl.fcntl(2, 4, 0o6000)
    """
    suite = parse_suite({"inputs": ["12345"] * 20, "outputs": ["[] 0 0 0 0 5 0"] * 20})
    verdict = tiered.judge_program(textwrap.dedent(program), suite)
    assert (verdict.status, verdict.passed) == ("passed", 20), verdict


def test_a_killed_forkserver_is_replaced(judge: CodeJudge) -> None:
    suite = parse_suite({"inputs": ["1"], "outputs": ["1"]})
    assert judge.judge_program("print(input())", suite).correct
    for pid in judge.sandbox.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    assert judge.judge_program("print(input())", suite).correct
