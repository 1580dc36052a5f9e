//! The commands of the stand-in, with the locks of Proxmox VE.

use super::machine::{Drive, EfiDisk, command_line};
use super::{SETUP, Setup, storage};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

pub(super) const ETC: &str = "/etc/pve";
const RUN: &str = "/run/qemu-server";
/// The time limit for an answer of QEMU.
const QMP_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for a QEMU to end by itself.
const QUIT_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) type Done<T = ()> = Result<T, String>;

/// The settings of a guest as it is now.
#[derive(Debug, Default, Clone)]
pub(super) struct Settings(Vec<(String, String)>);

impl Settings {
    fn read(text: &str) -> Self {
        let lines = text.lines().take_while(|line| !line.starts_with('['));
        let settings = lines.filter_map(|line| line.split_once(": "));
        let owned = settings.map(|(key, value)| (key.to_owned(), value.trim().to_owned()));
        Self(owned.filter(|(key, _)| !key.starts_with('#')).collect())
    }

    /// Returns a setting.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let mut all = self.all();
        all.find_map(|(it, value)| (it == key).then_some(value))
    }

    /// Returns all settings.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

pub(super) fn io(what: &str) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{what}: {error}")
}

fn print(text: &str) -> Done {
    crate::lab::print(&format!("{text}\n")).map_err(|error| error.to_string())
}

fn path_of(id: &str) -> PathBuf {
    Path::new(ETC).join(format!("qemu-server/{id}.conf"))
}

fn config(id: &str) -> Done<String> {
    let node = fs::read_link(Path::new(ETC).join("local")).unwrap_or_default();
    fs::read_to_string(path_of(id)).map_err(|_| {
        let node = node.display();
        format!("Configuration file '{node}/qemu-server/{id}.conf' does not exist")
    })
}

fn write(id: &str, text: &str) -> Done {
    let path = path_of(id);
    let new = path.with_extension(format!("conf.tmp.{}", std::process::id()));
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, &path))
        .map_err(io("write the file of the guest"))
}

fn check_lock(settings: &Settings, skips: bool) -> Done {
    match settings.get("lock").filter(|_| !skips) {
        Some(lock) => Err(format!("VM is locked ({lock})")),
        None => Ok(()),
    }
}

fn pid(id: &str) -> Option<i32> {
    let text = fs::read_to_string(Path::new(RUN).join(format!("{id}.pid"))).ok()?;
    let pid: i32 = text.trim().parse().ok()?;
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8_lossy(&line).into_owned();
    line.contains(&format!("/qemu-server/{id}.pid"))
        .then_some(pid)
}

/// One question to a QEMU, on a connection of its own, as Proxmox VE's commands ask.
fn ask(id: &str, command: &str, arguments: &Value, limit: Duration) -> Done<Value> {
    let timeout = |why: &dyn std::fmt::Display| {
        format!(
            "VM {id} qmp command '{command}' failed - unable to connect to VM {id} qmp socket \
                 - timeout ({why})"
        )
    };
    let path = Path::new(RUN).join(format!("{id}.qmp"));
    let socket = UnixStream::connect(path).map_err(|error| timeout(&error))?;
    let set = socket.set_read_timeout(Some(limit));
    set.map_err(io("set a time limit"))?;
    let mut writer = socket.try_clone().map_err(io("open the socket again"))?;
    let mut lines = BufReader::new(socket).lines();
    let mut next = || -> Done<Value> {
        let line = lines.next().ok_or_else(|| timeout(&"it ended"))?;
        let line = line.map_err(|error| timeout(&error))?;
        serde_json::from_str(&line).map_err(|error| error.to_string())
    };
    next()?;
    let mut answer = Value::Null;
    for line in [
        json!({"execute": "qmp_capabilities"}),
        json!({"execute": command, "arguments": arguments}),
    ] {
        writeln!(writer, "{line}").map_err(io("ask QEMU"))?;
        loop {
            answer = match next() {
                // QEMU ends before it answers, where it is to end.
                Err(_) if command == "quit" => return Ok(Value::Null),
                answer => answer?,
            };
            if answer.get("event").is_none() {
                break;
            }
        }
    }
    match answer.get("error") {
        Some(error) => {
            let why = error["desc"].as_str().unwrap_or_default();
            Err(format!("VM {id} qmp command '{command}' failed - {why}"))
        }
        None => Ok(answer["return"].take()),
    }
}

/// Carries out a command of Proxmox VE.
///
/// # Errors
/// What the command says when it fails.
pub fn command(program: &str, words: &[String]) -> Done {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (verb, rest) = words.split_first().unwrap_or((&"", &[]));
    if program == "pve-bridge" {
        return bridge(verb);
    }
    // A test lets a command fail.
    let fails = Path::new(ETC).join(format!("fail-{program}-{verb}"));
    if let Ok(why) = fs::read_to_string(fails) {
        return Err(why);
    }
    match (program, *verb) {
        ("pvesh", "get") if rest.first() == Some(&"/cluster/nextid") => next_id(),
        ("pvesm", verb) => print(&storage::command(verb, rest)?),
        ("qm", "list") => list(),
        ("qm", "config") => print(config(rest.first().unwrap_or(&""))?.trim_end()),
        ("qm", verb) => {
            let (id, options) = rest.split_first().ok_or("400 not enough arguments")?;
            let skips = options.contains(&"--skiplock");
            match verb {
                "start" => start(id, options, skips),
                "showcmd" => print(&line_of(id, None)?.join(" ")),
                "stop" => stop(id, skips),
                "reset" => {
                    check_lock(&Settings::read(&config(id)?), skips)?;
                    ask(id, "system_reset", &json!({}), QMP_TIMEOUT).map(drop)
                }
                "resume" => resume(id, skips),
                "suspend" => {
                    check_lock(&Settings::read(&config(id)?), skips)?;
                    ask(id, "stop", &json!({}), QMP_TIMEOUT).map(drop)
                }
                "status" => status(id),
                "unlock" => unlock(id),
                "set" => set(id, options, skips),
                "snapshot" => snapshot(id, options),
                other => Err(format!("ERROR: unknown command 'qm {other}'")),
            }
        }
        (program, verb) => Err(format!("ERROR: unknown command '{program} {verb}'")),
    }
}

/// Puts a guest's TAP device on the bridge of its card, as the script of Proxmox VE does.
fn bridge(device: &str) -> Done {
    let parts = device.strip_prefix("tap").and_then(|it| it.split_once('i'));
    let (id, index) = parts.ok_or_else(|| format!("{device} is no device of a guest"))?;
    let settings = Settings::read(&config(id)?);
    let card = settings.get(&format!("net{index}")).unwrap_or_default();
    let bridge = card
        .split(',')
        .find_map(|part| part.strip_prefix("bridge="));
    let bridge = bridge.ok_or("the card is on no bridge")?;
    for words in [
        ["set", device, "up"].as_slice(),
        &["set", device, "master", bridge],
    ] {
        let done = Command::new("ip").arg("link").args(words).status();
        if !done.map_err(io("run ip"))?.success() {
            return Err(format!("ip link {} failed", words.join(" ")));
        }
    }
    Ok(())
}

fn ids() -> Vec<u32> {
    let entries = fs::read_dir(Path::new(ETC).join("qemu-server"));
    let names = entries.into_iter().flatten().flatten();
    let mut ids: Vec<u32> = names
        .filter_map(|entry| entry.path().file_stem()?.to_str()?.parse().ok())
        .collect();
    ids.sort_unstable();
    ids
}

fn next_id() -> Done {
    let nodes = fs::read_dir(Path::new(ETC).join("nodes")).map_err(io("read the nodes"))?;
    let nodes: Vec<PathBuf> = nodes.flatten().map(|node| node.path()).collect();
    let is_taken = |id: &u32| {
        let file = format!("qemu-server/{id}.conf");
        nodes.iter().any(|node| node.join(&file).exists())
    };
    let next = (100..).find(|id| !is_taken(id)).unwrap_or(100);
    print(&format!("\"{next}\""))
}

fn list() -> Done {
    let mut text = format!("{:>10} {:<20} {:<10} {}", "VMID", "NAME", "STATUS", "PID");
    for id in ids() {
        let id = id.to_string();
        let settings = Settings::read(&config(&id)?);
        let name = settings.get("name").unwrap_or("-");
        let pid = pid(&id);
        let status = if pid.is_some() { "running" } else { "stopped" };
        let pid = pid.unwrap_or(0);
        text += &format!("\n{id:>10} {name:<20} {status:<10} {pid}");
    }
    print(&text)
}

fn drives(settings: &Settings) -> Done<Vec<Drive>> {
    let mut drives = Vec::new();
    for (key, value) in settings.all() {
        let is_drive = ["ide", "scsi", "virtio"].iter().any(|bus| {
            let number = key.strip_prefix(bus);
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        });
        if !is_drive {
            continue;
        }
        let first = value.split(',').next().unwrap_or_default();
        let is_cdrom = value.split(',').any(|part| part == "media=cdrom");
        let (path, format) = match first {
            "none" => (None, String::new()),
            id => {
                let (path, format) = existing(id)?;
                (Some(path), format)
            }
        };
        drives.push(Drive {
            key: key.to_owned(),
            path,
            format,
            is_cdrom,
            discards: value.split(',').any(|part| part == "discard=on"),
        });
    }
    Ok(drives)
}

/// Returns the path and the format of a volume that is there.
fn existing(id: &str) -> Done<(PathBuf, String)> {
    let path = storage::path(id)?;
    if !path.exists() {
        return Err(format!("volume '{id}' does not exist"));
    }
    Ok((path, storage::format(id).to_owned()))
}

/// Returns the volume of UEFI variables of a guest with UEFI firmware.
fn efi_disk(settings: &Settings) -> Done<Option<EfiDisk>> {
    if settings.get("bios") != Some("ovmf") {
        return Ok(None);
    }
    let value = settings.get("efidisk0").ok_or("no efidisk configured")?;
    let (path, format) = existing(value.split(',').next().unwrap_or_default())?;
    Ok(Some(EfiDisk {
        path,
        format,
        is_4m: value.split(',').any(|part| part == "efitype=4m"),
    }))
}

fn setup() -> Done<Setup> {
    let text = fs::read_to_string(Path::new(ETC).join(SETUP));
    let text = text.map_err(io("read the stand-in's setup"))?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

fn line_of(id: &str, machine: Option<&str>) -> Done<Vec<String>> {
    let settings = Settings::read(&config(id)?);
    let drives = drives(&settings)?;
    let efi_disk = efi_disk(&settings)?;
    let program = std::env::current_exe().map_err(io("find this program"))?;
    // QEMU starts it under the name of the script that it stands in for.
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path
        .split(':')
        .map(|folder| Path::new(folder).join("pve-bridge"));
    let script = folders.into_iter().find(|script| script.exists());
    let script = script.unwrap_or(program).display().to_string();
    let setup = setup()?;
    Ok(command_line(
        id,
        &settings,
        (&setup, machine),
        (&drives, efi_disk.as_ref()),
        &script,
    ))
}

fn option<'a>(options: &[&'a str], name: &str) -> Option<&'a str> {
    let mut pairs = options.windows(2);
    pairs.find_map(|words| (words[0] == name).then_some(words[1]))
}

fn start(id: &str, options: &[&str], skips: bool) -> Done {
    let migrated_from = option(options, "--migratedfrom");
    let uri = option(options, "--stateuri");
    if uri.is_some() && migrated_from.is_some() {
        // More parameters come there, as from the source's node.
        let mut input = String::new();
        let read = std::io::stdin().read_to_string(&mut input);
        read.map_err(io("read the standard input"))?;
    }
    let settings = Settings::read(&config(id)?);
    check_lock(&settings, skips)?;
    if pid(id).is_some() {
        return Err(format!("VM {id} already running"));
    }
    if let Some(node) = migrated_from {
        let path = Path::new(ETC).join(format!("nodes/{node}/qemu-server/{id}.conf"));
        if !path.exists() {
            let path = format!("nodes/{node}/qemu-server/{id}.conf");
            return Err(format!("Configuration file '{path}' does not exist"));
        }
    }
    let mut words = line_of(id, option(options, "--machine"))?;
    let incoming = Path::new(RUN).join(format!("{id}.migrate"));
    match uri {
        Some("unix") => {
            // One of an earlier move may be there.
            let _ = fs::remove_file(&incoming);
            let uri = format!("unix:{}", incoming.display());
            words.extend(["-incoming".to_owned(), uri, "-S".to_owned()]);
        }
        Some(other) => return Err(format!("no such state: {other}")),
        None => {}
    }
    start_tpm(id, &settings, uri.is_some())?;
    let (program, words) = words.split_first().ok_or("no command line")?;
    let mut qemu = Command::new(program);
    qemu.args(words).stdin(Stdio::null()).stdout(Stdio::null());
    let output = qemu.output().map_err(io("start QEMU"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("start failed: QEMU exited with code 1: {said}"));
    }
    if uri.is_some() {
        // As Proxmox VE sets them at the destination of its migrations.
        let capabilities =
            ["auto-converge", "xbzrle"].map(|name| json!({"capability": name, "state": true}));
        let set = json!({"capabilities": capabilities});
        ask(id, "migrate-set-capabilities", &set, QMP_TIMEOUT)?;
        print(&format!("migration listens on unix:{}", incoming.display()))?;
    }
    Ok(())
}

/// Starts the emulator of a guest's TPM, which ends with QEMU. That of a guest that arrives gets
/// its state from QEMU.
fn start_tpm(id: &str, settings: &Settings, arrives: bool) -> Done {
    let Some(value) = settings.get("tpmstate0") else {
        return Ok(());
    };
    let (state, _) = existing(value.split(',').next().unwrap_or_default())?;
    let is_2 = value.split(',').any(|part| part == "version=v2.0");
    let run = |program: &str, words: &[&str]| -> Done {
        let mut command = Command::new(program);
        let version = is_2.then_some("--tpm2");
        let done = command.args(words).args(version).stdin(Stdio::null());
        let output = done.output().map_err(io(&format!("start {program}")))?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let said = String::from_utf8_lossy(&output.stdout);
                Err(format!("{program} failed: {said}"))
            }
        }
    };
    let file = state.display();
    if !arrives {
        let uri = format!("file://{file}");
        let once = ["--runas", "0", "--not-overwrite"];
        let words = [
            &["--tpmstate", &uri, "--createek", "--lock-nvram"],
            &once[..],
        ]
        .concat();
        run("swtpm_setup", &words)?;
    }
    let uri = format!("backend-uri=file://{file},mode=0600");
    let control = format!("type=unixio,path={RUN}/{id}.swtpm,mode=0600");
    let pid = format!("file={RUN}/{id}.swtpm.pid");
    let words = [
        "socket",
        "--tpmstate",
        &uri,
        "--ctrl",
        &control,
        "--pid",
        &pid,
    ];
    let end = ["--terminate", "--daemon"];
    run("swtpm", &[&words[..], &end].concat())
}

fn stop(id: &str, skips: bool) -> Done {
    let Some(process) = pid(id) else {
        return Ok(());
    };
    check_lock(&Settings::read(&config(id)?), skips)?;
    if let Err(error) = ask(id, "quit", &json!({}), QMP_TIMEOUT) {
        crate::lab::say(&error);
        crate::lab::say("VM quit/powerdown failed - terminating now with SIGTERM");
        let killed = Command::new("kill").arg(process.to_string()).status();
        killed.map_err(io("end QEMU"))?;
    }
    let start = Instant::now();
    while pid(id).is_some() {
        if start.elapsed() > QUIT_TIMEOUT {
            return Err("VM quit/powerdown failed - got timeout".to_owned());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn resume(id: &str, skips: bool) -> Done {
    let status = ask(id, "query-status", &json!({}), QMP_TIMEOUT)?;
    if status["status"] == "running" {
        return Ok(());
    }
    check_lock(&Settings::read(&config(id)?), skips)?;
    ask(id, "cont", &json!({}), QMP_TIMEOUT).map(drop)
}

fn status(id: &str) -> Done {
    config(id)?;
    let status = if pid(id).is_some() {
        "running"
    } else {
        "stopped"
    };
    print(&format!("status: {status}"))
}

/// Changes the settings of a guest as it is now.
fn change(id: &str, key: &str, value: Option<&str>) -> Done {
    let text = config(id)?;
    let end = text.find("\n[").map_or(text.len(), |at| at + 1);
    let (now, rest) = text.split_at(end);
    let head = format!("{key}: ");
    let mut lines: Vec<String> = now
        .lines()
        .filter(|line| !line.starts_with(&head) && !line.is_empty())
        .map(str::to_owned)
        .collect();
    lines.extend(value.map(|value| format!("{head}{value}")));
    // Proxmox VE writes the settings in the order of their keys, after the notes.
    lines.sort_by_key(|line| match line.starts_with('#') {
        true => String::new(),
        false => line.clone(),
    });
    let separator = if rest.is_empty() { "" } else { "\n" };
    write(id, &format!("{}\n{separator}{rest}", lines.join("\n")))
}

fn unlock(id: &str) -> Done {
    change(id, "lock", None)
}

fn set(id: &str, options: &[&str], skips: bool) -> Done {
    check_lock(&Settings::read(&config(id)?), skips)?;
    let mut words = options.iter().filter(|word| **word != "--skiplock");
    while let Some(key) = words.next() {
        let key = key
            .strip_prefix("--")
            .ok_or_else(|| format!("400 bad option '{key}'"))?;
        let value = words.next().ok_or("400 an option without a value")?;
        crate::lab::say(&format!("update VM {id}: -{key} {value}"));
        match key {
            "delete" => change(id, value, None)?,
            key => change(id, key, Some(value))?,
        }
    }
    Ok(())
}

fn snapshot(id: &str, options: &[&str]) -> Done {
    let text = config(id)?;
    check_lock(&Settings::read(&text), false)?;
    let name = options.first().ok_or("400 not enough arguments")?;
    change(id, "parent", Some(name))?;
    let text = config(id)?;
    write(id, &format!("{text}\n[{name}]\nsnaptime: 1700000000\n"))
}
