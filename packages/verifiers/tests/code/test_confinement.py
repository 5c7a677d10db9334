"""Attempts of hostile programs, with forbidden and with allowed operations. Each guard that is removed opens its hole.

The tree of the system-call filter gives the same answers as its table.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from magicrl_verifiers.code import kernel
from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodeVerdict
from magicrl_verifiers.code.sandbox import SandboxOptions, SandboxRefusal
from magicrl_verifiers.code.suite import parse_suite

from .conftest import judge_of


def holes(judge: CodeJudge, attempts: dict[str, str]) -> set[str]:
    """Return the names of the attempts that did not raise."""
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


def test_packages_of_the_system_and_of_the_user_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dist-packages"
    folder.mkdir()
    (folder / "system_wide.py").write_text("value = 5")
    (tmp_path / "elsewhere.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder), str(tmp_path)])
    tests = parse_suite({"inputs": [""], "outputs": ["5"]})
    with CodeJudge(CodeOptions(sandbox=SandboxOptions(tier="A", preload=("system_wide",)))) as judge:
        assert judge.judge_program("import system_wide\nprint(system_wide.value)", tests).status == "passed"
    with (
        CodeJudge(CodeOptions(sandbox=SandboxOptions(tier="A", preload=("elsewhere",)))) as judge,
        pytest.raises(SandboxRefusal, match="preload elsewhere: No module named 'elsewhere'; programs see only"),
    ):
        judge.judge_program("print(5)", tests)


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


def test_holds_no_descriptor_and_no_secret(tiered: CodeJudge) -> None:
    """Check that memory holds no expected output, three descriptors are open, and the environment is empty."""
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
    """Tier A without one of its guards: the attack succeeds, which shows that the tests above can fail."""
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


@pytest.fixture(scope="module")
def isolated() -> Iterator[CodeJudge]:
    with judge_of("B") as made:
        yield made


def test_process_numbers_are_its_own_in_tier_b(isolated: CodeJudge) -> None:
    program = "import os\nprint(os.getpid(), os.getppid(), os.listdir('/tmp'))"
    assert isolated.outputs(program, parse_suite({"inputs": [""], "outputs": [""]})) == [b"1 0 []\n"]


def test_every_test_in_tier_b_has_an_empty_scratch_folder_of_its_own(isolated: CodeJudge) -> None:
    program = "import os\nprint(os.listdir('/tmp'))\nos.makedirs('a/b')\nopen('/tmp/a/b/c', 'w').write('x')"
    outputs = isolated.outputs(program, parse_suite({"inputs": [""] * 4, "outputs": [""] * 4}))
    assert outputs == [b"[]\n"] * 4


def test_nothing_passes_from_test_to_test_in_a_batch(tiered: CodeJudge) -> None:
    """After the first passing test, tests run in batches: no descriptor is inherited, and no file keeps state."""
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
    for forkserver in judge.sandbox._forkservers.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(forkserver._child.pid, 9)
    assert judge.judge_program("print(input())", suite).correct


def test_a_program_that_is_killed_from_outside_twice_has_failed(judge: CodeJudge, until: Callable[..., None]) -> None:
    """A program that finds a way to kill itself looks the same and would escape its verdict."""
    program = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'waiting')\ntime.sleep(60)"
    found: list[CodeVerdict] = []
    suite = parse_suite({"inputs": [""], "outputs": [""]})
    thread = threading.Thread(target=lambda: found.append(judge.judge_program(program, suite)))
    thread.start()
    killed: set[int] = set()

    def killed_another() -> bool:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.pid not in killed and process.name() == "waiting":
                    killed.add(process.pid)
                    process.kill()
                    return True
        return False

    for _ in range(2):
        until(killed_another)
    thread.join()
    assert (found[0].status, found[0].reason) == ("runtime_error", "test 1: killed from outside twice")


RIGHT = "print(input())"
ECHO = {"inputs": ["1"] * 3, "outputs": ["1"] * 3, "time_limit": 0.4}


def status_of(judge: CodeJudge, program: str) -> str:
    """Judge a hostile program. An honest one must pass right after it, in the same sandbox, which is not replaced."""
    judge.judge_program(RIGHT, parse_suite(ECHO))
    before = dict(judge.sandbox._forkservers)
    status = judge.judge_program(textwrap.dedent(program), parse_suite(ECHO)).status
    assert judge.judge_program(RIGHT, parse_suite(ECHO)).status == "passed"
    assert judge.sandbox._forkservers == before
    return status


def test_asks_the_kernel_for_nothing_that_is_shared_with_others(tiered: CodeJudge) -> None:
    attempts = {
        "semaphores": denied(64, 0, 1, 0o1000),
        "messages": denied(68, 0, 0o1000),
        "posix_messages": denied(240, 0, 0o100, 0o600, 0),
        "inotify": denied(294, 0),
        "fanotify": denied(300, 0, 0),
        "timerfd": denied(283, 0, 0),
        "signalfd": denied(289, -1, 0, 8, 0),
        "timer": denied(222, 0, 0, 0),
        "queued_signal": denied(129, 1, 10, 0),
        "locked_memory": denied(149, 0, 4096),
        "secret_memory": denied(447, 0),
        "own_filter": denied(317, 1, 0, 0),
        "own_rules": denied(444, 0, 0, 1),
        "exec_descriptor": denied(322, 0, 0, 0, 0, 0x1000),
        "fallocate": denied(285, 1, 0, 0, 1 << 20),
        "large_pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 1031, 1 << 20)",
        "seal": "import fcntl; fcntl.fcntl(1, 1033, 2)",
        "lease": "import fcntl; fcntl.fcntl(1, 1024, 0)",
        "pass_a_descriptor": "import array; a, b = socket.socketpair(); a.sendmsg([b'x'],"
        " [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])",
        "thread_with_descriptors_of_its_own": denied(56, 0x10B00, 0, 0, 0, 0),
        "process_that_shares_memory": denied(56, 0x4111, 0, 0, 0, 0),
    }
    assert holes(tiered, attempts) == set()


ATTACKS = {"unshare": 272, "ptrace": 101, "bpf": 321, "mount": 165, "setns": 308, "process_vm_readv": 310}
ATTACKS |= {"pidfd_open": 434, "io_uring_setup": 425, "init_module": 175, "add_key": 248, "keyctl": 250}
ATTACKS |= {"perf_event_open": 298, "name_to_handle_at": 303, "kcmp": 312, "userfaultfd": 323}
ATTACKS |= {"pidfd_send_signal": 424, "pidfd_getfd": 438, "process_madvise": 440}


@pytest.mark.parametrize("call", ATTACKS)
def test_calls_that_only_attacks_make_end_the_program(tiered: CodeJudge, call: str) -> None:
    program = f"print(input(), flush=True)\nimport ctypes\nctypes.CDLL(None).syscall({ATTACKS[call]}, 0, 0, 0, 0, 0)"
    assert status_of(tiered, program) == "security"


def test_limits_cannot_be_raised(tiered: CodeJudge) -> None:
    kinds = ["AS", "FSIZE", "CPU", "NOFILE", "CORE"]
    attempts = {
        kind: f"import resource; old = resource.getrlimit(resource.RLIMIT_{kind})[1]\n"
        f"if old < 0: raise OSError\nresource.setrlimit(resource.RLIMIT_{kind}, (old + 1, old + 1))"
        for kind in kinds
    }
    attempts |= {
        f"{kind}_none": f"import resource; resource.setrlimit(resource.RLIMIT_{kind}, (-1, -1))" for kind in kinds
    }
    assert holes(tiered, attempts) == set()


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint(0)", {"time_limit", "wrong_answer"}),
        ("import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
         "  except (OSError, ValueError): pass\nwhile True: pass", {"time_limit"}),
        ("import ctypes, threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin).start()\n"
         "ctypes.CDLL(None).syscall(60, 0)", {"time_limit"}),
        ("import threading, time\nwhile True:\n  threading.Thread(target=time.sleep, args=(9,)).start()",
         {"security", "runtime_error", "memory_limit", "time_limit"}),
        ("import os\nwhile True: os.write(2, b'x' * (1 << 20))", {"runtime_error", "output_limit"}),
        ("import os\nos.ftruncate(1, 1 << 40)", {"runtime_error", "output_limit"}),
        ("import os\nos.ftruncate(0, 4 << 20)\nos.ftruncate(2, 4 << 20)\nprint(0)", {"wrong_answer"}),
        ("import os, sys\nsys.stdout.close()\nfor n in range(300):\n  try: os.close(n)\n  except OSError: pass",
         {"wrong_answer", "runtime_error"}),
        ("import os\nkept = []\ntry:\n  while True: kept.append(os.pipe())\nexcept OSError: pass\n"
         "for r, w in kept:\n  os.set_blocking(w, False)\n  try:\n    while True: os.write(w, bytes(65536))\n"
         "  except OSError: pass\nprint(0)", {"wrong_answer"}),
        ("import ctypes\nctypes.memset(0, 1, 1)", {"runtime_error"}),
        ("import ctypes, sys\nctypes.memset(id(None), 0, 16)\nprint(0)", {"wrong_answer", "runtime_error"}),
        ("import mmap, os\nos.ftruncate(1, 4096)\nmmap.mmap(1, 4096)[:2] = b'0\\n'", {"wrong_answer"}),
        ("import marshal\nmarshal.loads(b'c' + bytes(range(256)) * 9)", {"runtime_error"}),
    ],
)  # fmt: skip
def test_abuse_of_what_is_allowed_ends_the_program_alone(tiered: CodeJudge, program: str, statuses: set[str]) -> None:
    assert status_of(tiered, program) in statuses


def test_a_full_scratch_folder_is_empty_for_the_next_test(isolated: CodeJudge) -> None:
    fills = """
    import os
    written = made = 0
    try:
        for n in range(100):
            with open(f"/tmp/{n}", "wb") as file:
                written += file.write(bytes(1 << 20))
    except OSError: pass
    try:
        for n in range(9999):
            os.mkdir(f"/tmp/d{n}")
            made += 1
    except OSError: pass
    print(written >> 20 <= 64, made < 2000, len(os.listdir("/tmp")) > 1000)
    """
    outputs = isolated.outputs(textwrap.dedent(fills), parse_suite({"inputs": [""] * 3, "outputs": [""] * 3}))
    assert outputs == [b"True True True\n"] * 3


def test_what_one_test_does_to_its_interpreter_does_not_reach_the_next(tiered: CodeJudge) -> None:
    program = """
    import builtins, gc, json, os, random, sys, threading
    print(len(gc.get_objects()) > 9, sys.getrecursionlimit(), random.random(), len(dir(builtins)), json.dumps(1),
          threading.active_count(), os.getcwd(), os.umask(0o22), sorted(os.environ), gc.isenabled())
    builtins.planted, json.dumps = 1, None
    sys.setrecursionlimit(77); random.seed(5); os.umask(0o77); os.environ["PLANTED"] = "1"; gc.disable()
    sys.modules["bisect"] = None
    """
    outputs = tiered.outputs(textwrap.dedent(program), parse_suite({"inputs": [""] * 4, "outputs": [""] * 4}))
    assert outputs[0] is not None
    assert outputs == [outputs[0]] * 4
    suite = parse_suite({"inputs": [""] * 12, "outputs": [outputs[0].decode()] * 12})
    assert tiered.judge_program(textwrap.dedent(program), suite).passed == 12  # one test, then a batch


KILL, EPERM = 0x80000000, 0x00050001
OWN_PID = kernel._PID  # pyright: ignore[reportPrivateUsage]
ARGUMENTS = [
    (0, 0, 0, 0, 0, 0),
    (1, 1, 0, 0, 0, 0),
    (OWN_PID, 9, 9, 0, 0, 0),
    (OWN_PID, 15, 15, 0, 0, 0),
    (OWN_PID + 1, 15, 9, 0, 0, 0),
    (0x003D0F00, 0, 0, 0, 0, 0),  # flags with which libc creates threads
    (0x7C020011, 0, 0, 0, 0, 0),
    (15, 0x5413, 1, 2, 0, 0),
    (22, 2, 7, 1 << 40, 1 << 40, 0),
]


def answer(ops: Sequence[tuple[int, int, int, int]], number: int, arguments: Sequence[int], arch: int) -> int:
    """Return the decision of the kernel's BPF interpreter for these operations."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    place, register = 0, 0
    while True:
        code, yes, no, value = ops[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            register &= value
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            place += yes if holds else no


@pytest.mark.parametrize("execute", [False, True])
def test_the_tree_answers_every_call_as_its_rule_does(execute: bool) -> None:
    rules, arch = kernel._rules(execute), kernel.AUDIT_ARCH_X86_64  # pyright: ignore[reportPrivateUsage]
    tree = kernel.Filter(allow_exec=execute).ops
    for number in range(480):
        for arguments in ARGUMENTS:
            rule = rules.get(number, [(0x06, 0, 0, EPERM)])
            assert answer(tree, number, arguments, arch) == answer(rule, number, arguments, arch), (number, arguments)
    for number in (0x40000000, 0x40000001, 0xFFFFFFFF):
        assert answer(tree, number, ARGUMENTS[0], arch) == KILL
    assert answer(tree, 0, ARGUMENTS[0], 0x40000003) == KILL  # 32-bit call
