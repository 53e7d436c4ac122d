"""What a machine of a cluster says of itself. It is sent there as text and knows nothing of us; Python 3.7 can read it.

Standard input: the request as JSON (``facts.Request``); argument: the folder of the toolkit, or nothing. Prints
``facts=`` and JSON (``facts.Facts``). Changes nothing, and reads the headers of weights only.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND_S = 20
LISTENS = "0A"  # state column of /proc/net/tcp
MOST_HEADER_BYTES = 100_000_000
TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest"


def read(path: str | Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def say(command: list[str]) -> str:
    """Output of a command; a word about why where it gives none."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
    except FileNotFoundError:
        return "missing"
    except subprocess.TimeoutExpired:
        return f"silent for {COMMAND_S} s"
    return done.stdout.decode(errors="replace")


def taken_ports(wanted: list[tuple[str, int, str]], run: str) -> list[dict[str, Any]]:
    """Those that cannot be listened on, each with who listens there, as far as it can be seen."""
    ours = recorded(run)
    found = []
    for host, port, purpose in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                pid = holder(port)
                command = read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:120] if pid else str(error.strerror)
                is_ours = pid > 0 and session_of(pid) in ours
                found.append({"port": port, "purpose": purpose, "pid": pid, "by": command, "is_ours": is_ours})
    return found


def recorded(run: str) -> set[int]:
    """Ids of the processes that run_pd.sh started here for this cluster and that its record still names."""
    try:
        return {process["pid"] for process in json.loads(read(f"{run}/state.json"))["processes"]}
    except (ValueError, KeyError):
        return set()


def holder(port: int) -> int:
    """Process that listens on a port; 0: none that can be seen."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in read(f"/proc/net/{table}").splitlines()[1:]]
    inodes = {line[9] for line in lines if line[3] == LISTENS and int(line[1].rsplit(":", 1)[1], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for link in Path("/proc").glob("[0-9]*/fd/*") if wanted else ():
        try:
            if os.readlink(str(link)) in wanted:  # noqa: PTH115 - that of Path is younger than some Python there
                return int(link.parts[2])
        except OSError:
            continue
    return 0


def session_of(pid: int) -> int:
    """Process id of the leader of its session; 0 if it has ended."""
    text = read(f"/proc/{pid}/stat")
    return int(text[text.rindex(")") + 2 :].split()[3]) if ")" in text else 0


def interface_of(node: str) -> tuple[str, int]:
    """Name and MTU of the interface that carries an address; "" and 0 where it cannot be told."""
    try:
        address = socket.getaddrinfo(node, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "", 0
    for line in say(["ip", "-o", "address", "show"]).splitlines():
        columns = line.split()
        if len(columns) > 3 and columns[3].split("/")[0] == address:
            name = columns[1].split("@")[0]
            words = say(["ip", "-o", "link", "show", "dev", name]).split()
            return name, int(words[words.index("mtu") + 1]) if "mtu" in words else 0
    return "", 0


def room(path: str) -> int:
    """Free bytes where a folder is or would be made."""
    there = next(place for place in (Path(path), *Path(path).parents) if place.is_dir())
    return shutil.disk_usage(there).free


def weights(folder: Path, *, only_config: bool) -> dict[str, Any]:
    """What lies in the folder of a checkpoint, what is wrong with it, and a digest of everything but the numbers."""
    problems: list[str] = []
    total, size = hashlib.sha256(), 0
    config, index = read(folder / "config.json"), read(folder / "model.safetensors.index.json")
    total.update(config.encode())
    if not config:
        problems.append(f"{folder}/config.json cannot be read")
    shards: list[str] = []
    if not only_config:
        try:
            shards = sorted(set(json.loads(index)["weight_map"].values())) if index else ["model.safetensors"]
        except (ValueError, KeyError, AttributeError):
            problems.append(f"{folder}/model.safetensors.index.json is no index")
    for shard in shards:
        total.update(shard.encode())
        problem, length, header = look_at(folder / shard)
        problems += [problem] if problem else []
        size += length
        total.update(header)
    return {"problems": problems, "num_shards": len(shards), "size": size, "digest": total.hexdigest()[:12]}


def look_at(file: Path) -> tuple[str, int, bytes]:
    """What is wrong with a shard, its size, and its header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length <= MOST_HEADER_BYTES else b""
    except OSError as error:
        return f"{file.name}: {error.strerror}", 0, b""
    try:
        ends = [tensor["data_offsets"][1] for key, tensor in json.loads(header).items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{file.name}: its header is damaged", size, b""
    wanted = 8 + length + max(ends or [0])
    return "" if size == wanted else f"{file.name}: {size} bytes, but its header says {wanted}", size, header


def key_of(file: Path, label: str) -> dict[str, Any]:
    """Whether the key of the cluster is there, who may read it, and a digest that is equal exactly where it is."""
    try:
        mode, keys = file.stat().st_mode & 0o777, file.read_bytes().split(b"\n")
    except OSError as error:
        return {"problem": f"{file}: {error.strerror}", "mode": 0, "digest": ""}
    first = next((key.strip() for key in keys if key.strip()), b"")
    if not first:
        return {"problem": f"{file} holds no key", "mode": mode, "digest": ""}
    digest = hashlib.blake2b(first, key=label.encode(), digest_size=6).hexdigest()
    return {"problem": "", "mode": mode, "digest": digest}


def devices(count: int) -> dict[str, Any]:
    """What the tools of NPU say: the mapping and the table, and the state of each device's link."""
    if not count:
        return {"mapping": "", "table": "", "links": [], "health": []}
    asked = [["hccn_tool", "-i", str(number), what, "-g"] for what in ("-link", "-net_health") for number in range(count)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        said = list(pool.map(say, [["npu-smi", "info", "-m"], ["npu-smi", "info"], *asked]))
    return {"mapping": said[0], "table": said[1], "links": said[2 : 2 + count], "health": said[2 + count :]}


def killed_at_logout() -> bool:
    """Whether what this user leaves running ends with its session, by the settings of systemd's logind."""
    names = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
    said = say(["loginctl", "show-session", *(f"--property={name}" for name in names)])
    told = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    only, spared = told.get("KillOnlyUsers", "").split(), told.get("KillExcludeUsers", "").split()
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # one without a name, as in a container
        return False
    return told.get("KillUserProcesses") == "yes" and (not only or user in only) and user not in spared


def toolkit(folder: str) -> str:
    """Version of the toolkit; "" where none was found."""
    for file in sorted(Path(folder or TOOLKIT).glob("*-linux/ascend_toolkit_install.info")):
        for line in read(file).splitlines():
            if line.startswith("version="):
                return line.split("=", 1)[1].strip()
    return ""


def release_of(path: str) -> str:
    """Name of the release that is current; "" where there is none."""
    try:
        return Path(os.readlink(f"{path}/current")).name if path else ""  # noqa: PTH115
    except OSError:
        return ""


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    fields = (line.split() for line in read("/proc/meminfo").splitlines())
    memory = {words[0]: int(words[1]) << 10 for words in fields}
    limits = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK, "core": resource.RLIMIT_CORE}
    count = request["num_devices"]
    name, mtu = interface_of(request["node"])
    facts = {
        "release": release_of(request["path"]),
        "ports": taken_ports(request["ports"], request["run"]),
        "interface": name,
        "mtu": mtu,
        "free_bytes": {path: room(path) for path in request["folders"]},
        "memory_bytes": memory.get("MemTotal:", 0),
        "free_memory_bytes": memory.get("MemAvailable:", 0),
        "cores": len(os.sched_getaffinity(0)),
        "weights": weights(Path(request["model"]), only_config=request["only_config"]) if request["model"] else None,
        "key": key_of(Path(request["key_file"]), request["label"]) if request["key_file"] else None,
        "limits": {what: resource.getrlimit(limit)[0] for what, limit in limits.items()},
        "is_killed_at_logout": killed_at_logout(),
        "devices": devices(count),
        "toolkit": toolkit(sys.argv[1]) if count else "",
    }
    sys.stdout.write(f"facts={json.dumps(facts)}\n")


if __name__ == "__main__":
    main()
