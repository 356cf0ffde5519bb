"""Small hostile programs, by what they try; `test_hostile_programs.py` runs them in each sandbox.

Each raises an OSError where it is stopped, and prints "broken" where it is not. A program finds in
`t` what it may try to harm: all of it belongs to the test, or to the program itself.
"""

from typing import NamedTuple

DRIVER = """
import builtins, ctypes, errno, json, os, struct
from types import SimpleNamespace
libc = ctypes.CDLL(None, use_errno=True)

def call(x86, arm, *args):
    # a call by its number, past whatever the C library or Python would do
    number = arm if os.uname().machine == "aarch64" else x86
    if number is None:
        raise OSError(errno.ENOSYS, "not on this machine")
    whole = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in (number, *args)]
    result = libc.syscall(*whole)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

class Names(dict):
    def __missing__(self, name):
        if hasattr(builtins, name):
            raise KeyError(name)
        return __import__(name)  # when it is needed: each program is a process of its own

given = json.loads(input())
t = SimpleNamespace(**given["targets"])
try:
    exec(given["code"], {}, Names(libc=libc, call=call, t=t))
except OSError as error:
    print("held:", errno.errorcode.get(error.errno, error))
"""


class Program(NamedTuple):
    """One program; `breaks` are the sandboxes that do not stop it, and say so.

    needs_rights: without a sandbox it is stopped too on some machines, as in an ordinary container.
    """

    what: str
    name: str
    code: str
    breaks: tuple[str, ...] = ()
    needs_rights: bool = False


READ = "files outside cannot be read"
WRITE = "files outside cannot be made, changed or removed"
ATTRIBUTES = "modes, owners, times and attributes of files cannot be changed"
EXISTENCE = "whether a file exists, and its size, cannot be asked"
PROCESSES = "other processes cannot be seen, nor read"
CONTROL = "other processes cannot be signalled, traced or slowed"
NETWORK = "no network, no sockets, no shared memory or queues"
KERNEL = "no namespaces, mounts, tracing or other parts of the kernel"
STARTS = "no other process can be started, and no user changed"

# what -> {name: code}; after a `#`, the sandboxes that let it happen, or "rights"
TABLE = {
    READ: {
        "of the user alone": "open(t.private).read()",
        "of everybody #weak": "open(t.secret).read()",
        "of the system #weak": "open('/etc/passwd').read()",
        "a folder #weak": "os.listdir(t.folder)",
        "files that match #weak": "if not glob.glob(t.folder + '/*'): raise OSError('nothing')",
        "from inside the folder #weak": "os.chdir(t.folder); open('secret').read()",
        "through an open folder #weak":
            "os.open('secret', os.O_RDONLY, dir_fd=os.open(t.folder, os.O_PATH))",
        "opened for nothing, then for reading #weak":
            "open(f'/proc/self/fd/{os.open(t.secret, os.O_PATH)}').read()",
        "through /proc/self/root #weak": "open('/proc/self/root' + t.secret).read()",
        "through the parent's root": "open(f'/proc/{os.getppid()}/root{t.secret}').read()",
        "through descriptors that are left #rights":
            "for n in range(3, 256):\n"
            "    try: os.open('../' * 9 + t.private[1:], os.O_RDONLY, dir_fd=n); break\n"
            "    except OSError: pass\n"
            "else: raise OSError('none')",
        "mapped #weak": "mmap.mmap(os.open(t.secret, os.O_RDONLY), 1, prot=mmap.PROT_READ)",
        "by the C library #weak":
            "libc.fopen.restype = ctypes.c_void_p\n"
            "if not libc.fopen(t.secret.encode(), b'r'): raise OSError('none')",
        "as a module #weak":
            "sys.path.insert(0, t.folder)\n"
            "try: import hostile_module\n"
            "except ImportError: raise OSError('none')",
        "as a library #weak":
            "try: ctypes.CDLL(t.secret)\n"
            "except OSError as e:\n"
            "    if 'denied' in str(e) or 'such' in str(e): raise",
        "by a database #weak":
            "there = f'file:{t.database}?mode=ro'\n"
            "try: sqlite3.connect(there, uri=True).execute('select 1 from x')\n"
            "except sqlite3.OperationalError: raise OSError('none')",
        "by openat2": "call(437, 437, -100, t.secret.encode(), struct.pack('QQQ', 0, 0, 0), 24)",
        "by its handle #rights":
            "call(303, 264, -100, t.secret.encode(), struct.pack('Ii128x', 128, 0), b'    ', 0)",
        "another link to it #rights": "os.link(t.secret, t.folder + '/link')",
        "the memory of the machine #rights": "open('/dev/mem', 'rb').read(1)",
        "the log of the kernel #rights": "open('/dev/kmsg', 'rb').read(1)",
    },
    WRITE: {
        "appended": "open(t.everybodys, 'a').write('x')",
        "overwritten": "open(t.everybodys, 'r+').write('x')",
        "emptied": "open(t.everybodys, 'w')",
        "emptied by truncate": "os.truncate(t.everybodys, 0)",
        "emptied while opened for reading":
            "os.open(t.everybodys, os.O_RDONLY | os.O_TRUNC)\n"
            "if os.stat(t.everybodys).st_size: raise OSError('is whole')",
        "emptied while opened for nothing":
            "os.open(t.everybodys, 3 | os.O_TRUNC)\n"
            "if os.stat(t.everybodys).st_size: raise OSError('is whole')",
        "emptied by creat #rights": "call(85, None, t.everybodys.encode(), 0o666)",
        "made": "open(t.folder + '/new', 'x')",
        "made without a name #rights": "os.open(t.folder, os.O_TMPFILE | os.O_RDWR)",
        "made while opened for reading": "os.open(t.folder + '/new', os.O_CREAT)",
        "in /var/tmp": "open(f'/var/tmp/{t.name}', 'x'); os.unlink(f'/var/tmp/{t.name}')",
        "in /dev/shm": "open(f'/dev/shm/{t.name}', 'x'); os.unlink(f'/dev/shm/{t.name}')",
        "a folder": "os.mkdir(t.folder + '/new')",
        "a pipe": "os.mkfifo(t.folder + '/new')",
        "a device #rights": "os.mknod(t.folder + '/new', 0o20666, os.makedev(1, 3))",
        "a link": "os.symlink('/', t.folder + '/new')",
        "a socket": "socket.socket(socket.AF_UNIX).bind(t.folder + '/new')",
        "a database":
            "try: sqlite3.connect(t.folder + '/new').execute('create table x (y)')\n"
            "except sqlite3.OperationalError: raise OSError('none')",
        "removed": "os.unlink(t.everybodys)",
        "a folder removed": "os.rmdir(t.empty)",
        "renamed": "os.rename(t.everybodys, t.folder + '/other')",
        "exchanged": "call(316, 276, -100, t.everybodys.encode(), -100, t.secret.encode(), 2)",
    },
    ATTRIBUTES: {
        "mode #rights": "os.chmod(t.everybodys, 0o777)",
        "mode, by the new call #rights": "call(452, 452, -100, t.everybodys.encode(), 0o777, 0)",
        "owner #rights": "os.chown(t.everybodys, -1, os.getgid())",
        "times": "os.utime(t.everybodys)",
        "attribute #rights": "os.setxattr(t.everybodys, 'user.x', b'1')",
        "attribute removed #rights": "os.removexattr(t.everybodys, 'user.made')",
        "attributes read #rights": "os.listxattr(t.everybodys)",
        "flags #rights":
            "fcntl.ioctl(os.open(t.secret, os.O_RDONLY), 0x40086602, struct.pack('l', 0))",
    },
    EXISTENCE: {
        "is it there #landlock weak": "os.stat(t.secret)",
        "may it be read #landlock weak":
            "if not os.access(t.secret, os.F_OK): raise OSError('none')",
        "where a link leads #landlock weak": "os.readlink(t.link)",
    },
    PROCESSES: {
        "which there are #weak": "os.listdir('/proc')",
        "its command line #weak": "open(f'/proc/{t.pid}/cmdline').read()",
        "its environment": "open(f'/proc/{os.getppid()}/environ').read()",
        "its memory #rights": "open(f'/proc/{os.getppid()}/mem', 'rb')",
        "another process's memory #rights": "open(f'/proc/{t.pid}/mem', 'rb')",
        "its map of memory": "open(f'/proc/{os.getppid()}/maps').read()",
        "its files": "os.listdir(f'/proc/{os.getppid()}/fd')",
        "its output": "open(f'/proc/{os.getppid()}/fd/1', 'r+b')",
        "the program's own memory, as a file": "open('/proc/self/mem', 'r+b')",
        "connections #weak": "open('/proc/net/tcp').read()",
        "the machine #weak": "os.listdir('/sys/class')",
        "memory, by a call #rights":
            "here = ctypes.create_string_buffer(8)\n"
            "iov = struct.pack('PN', ctypes.addressof(here), 8)\n"
            "call(310, 270, os.getppid(), iov, 1, iov, 1, 0)",
        "memory written, by a call #rights":
            "here = ctypes.create_string_buffer(8)\n"
            "iov = struct.pack('PN', ctypes.addressof(here), 8)\n"
            "call(311, 271, os.getppid(), iov, 1, iov, 1, 0)",
        "a descriptor of it #rights": "call(438, 438, call(434, 434, os.getppid(), 0), 1, 0)",
        "does it share files #rights": "call(312, 272, os.getppid(), os.getppid(), 0, 0, 0)",
        "its locks": "call(274, 100, os.getppid(), struct.pack('P', 0) * 2, struct.pack('P', 0))",
    },
    CONTROL: {
        "a signal to the parent": "os.kill(os.getppid(), 0)",
        "a signal to the group": "os.kill(0, 0)",
        "a signal to everybody": "os.kill(-1, 0)",
        "a signal to another user's process #rights": "os.kill(t.pid, 0)",
        "a signal to a thread": "call(200, 130, os.getppid(), 0)",
        "a signal to a thread of a process": "call(234, 131, os.getppid(), os.getppid(), 0)",
        "a signal with a value":
            "call(129, 138, os.getppid(), 0, struct.pack('iii116x', 0, 0, -1))",
        "a handle": "os.pidfd_open(os.getppid())",
        "a signal by a pipe":
            "r, w = os.pipe(); fcntl.fcntl(r, 8, os.getppid()); fcntl.fcntl(r, 10, 9)",
        "traced #rights": "call(101, 117, 0x4206, os.getppid(), 0, 0)",
        "traced by the parent": "call(101, 117, 0, 0, 0, 0)",
        "its limits": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
        "its priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "the priority of all of the user": "os.setpriority(os.PRIO_USER, 0, 19)",
        "its cores": "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
        "its scheduling": "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
        "its priority of files": "call(251, 30, 1, os.getppid(), 3 << 13)",
        "its memory moved #rights": "call(279, 239, os.getppid(), 0, 0, 0, 0, 0)",
        "out of the group": "os.setsid()",
        "another group": "os.setpgid(0, 0)",
    },
    NETWORK: {
        "a connection": "socket.create_connection(('127.0.0.1', t.port))",
        "a server": "socket.create_server(('127.0.0.1', 0))",
        "a datagram":
            "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
        "IPv6 #rights": "socket.socket(socket.AF_INET6)",
        "a raw socket #rights": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "packets #rights": "socket.socket(17, socket.SOCK_RAW)",
        "routes": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "ciphers #rights": "socket.socket(38, socket.SOCK_SEQPACKET)",
        "a virtual machine's #rights": "socket.socket(40)",
        "a socket by its path": "socket.socket(socket.AF_UNIX).connect(t.unix)",
        "an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + t.abstract)",
        "a datagram from a pair":
            "pair = socket.socketpair(type=socket.SOCK_DGRAM)\n"
            "pair[0].sendto(b'x', t.unix_datagrams)",
        "a pair of another family #rights": "socket.socketpair(socket.AF_INET)",
        "shared memory": "call(29, 194, 0, 4096, 0o1600)",
        "semaphores": "call(64, 190, 0, 1, 0o1600)",
        "messages": "call(68, 186, 0, 0o1600)",
        "a queue #rights":
            "call(240, 180, b'hostile', 0o100 | 2, 0o600, 0); call(241, 181, b'hostile')",
        "a semaphore with a name": "_multiprocessing.SemLock(0, 1, 1, '/hostile', True)",
        "a key #rights": "call(248, 217, b'user', b'hostile', b'x', 1, -2)",
        "files in memory": "os.memfd_create('x')",
    },
    KERNEL: {
        "a user's namespace #rights": "call(272, 97, 0x10000000)",
        "a network of its own #rights": "call(272, 97, 0x40000000)",
        "a user's namespace, by clone #rights":
            "if call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) == 0: os._exit(0)",
        "a thread in a namespace #rights": "call(56, 220, 0x10010900, 0, 0, 0, 0)",
        "a process by clone3 #rights":
            "if call(435, 435, struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64) == 0: os._exit(0)",
        "another's namespace #rights": "call(308, 268, os.open('/proc/1/ns/net', os.O_RDONLY), 0)",
        "a mount #rights": "call(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0)",
        "a mount removed #rights": "call(166, 39, b'/tmp', 2)",
        "another root #rights": "os.chroot('/')",
        "a mount, by the new call #rights": "call(430, 430, b'tmpfs', 0)",
        "io_uring #rights": "call(425, 425, 8, bytes(120))",
        "bpf #rights": "call(321, 280, 0, bytes(128), 128)",
        "events #rights": "call(298, 241, struct.pack('II120x', 1, 128), 0, -1, -1, 0)",
        "faults of pages #rights": "call(323, 282, 0)",
        "changes of files": "call(294, 26, 0)",
        "accesses to files #rights": "call(300, 262, 0, 0)",
        "another personality #rights": "call(135, 92, 0)",
        "another filter": "call(317, 277, 2, 0, struct.pack('I', 0x7FFF0000))",
        "core dumps": "if libc.prctl(4, 1, 0, 0, 0): raise OSError('held')",
        "the end of another": "if libc.prctl(1, 9, 0, 0, 0): raise OSError('held')",
        "segments #rights": "call(154, None, 0, bytes(64), 64)",
        "ports #rights": "call(172, None, 3)",
        "a module #rights": "call(175, 105, 0, 0, b'')",
        "the clock #rights": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
        "the name of the machine #rights": "socket.sethostname('hostile')",
        "the log #rights": "call(103, 116, 3, ctypes.create_string_buffer(8), 8)",
        "locked memory": "call(149, 228, ctypes.create_string_buffer(8), 8)",
        "a call of x32 #rights": "call(0x40000000 + 39, None)",
    },
    STARTS: {
        "fork": "if os.fork() == 0: os._exit(0)",
        "fork, by its number": "if call(57, None) == 0: os._exit(0)",
        "vfork #rights": "call(58, None) or os._exit(0)",
        "clone": "if call(56, 220, 17, 0, 0, 0, 0) == 0: os._exit(0)",
        "a shell #rights": "subprocess.run(['/bin/sh', '-c', 'true'])",
        "a shell, by system #rights":
            "if os.system('true'): raise OSError('none')",
        "another Python": "subprocess.run([sys.executable, '-c', 'pass'], close_fds=False)",
        "posix_spawn": "os.posix_spawn(sys.executable, ['x', '-c', ''], {})",
        "in its own place": "os.execv(sys.executable, ['x', '-c', 'print(\"broken\")'])",
        "by a descriptor":
            "call(322, 281, os.open(sys.executable, os.O_RDONLY), b'', 0, 0, 0x1000)",
        "a program with the rights of root #rights": "os.execv('/bin/su', ['su', '--version'])",
        "a process of multiprocessing":
            "multiprocessing.get_context('fork').Process(target=int).start()",
        "root #rights": "os.setuid(0)",
        "groups #rights": "os.setgroups([0])",
        "the same user": "os.setuid(os.getuid())",
        "capabilities": "call(126, 91, struct.pack('Ii', 0x20080522, 0), bytes(24))",
    },
}  # fmt: skip


def _program(what: str, name: str, code: str) -> Program:
    name, _, marks = name.partition(" #")
    words = marks.split()
    breaks = tuple(word for word in words if word != "rights")
    return Program(what, name, f"{code}\nprint('broken')", breaks, "rights" in words)


PROGRAMS = [_program(what, *row) for what, rows in TABLE.items() for row in rows.items()]
