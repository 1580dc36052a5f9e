//! Tests attaching to guests whose QEMU a plain script started, end to end: they are moved, or left
//! unchanged.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::monitor::Monitor;
use common::{LIMIT, Running, Stage, boot};
use longhaul_api::{GuestState, Outcome, Phase};
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::guest::CHANNEL_NAME;
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const LINK: &str = "400mbit,4ms";
/// So slow that there is time for actions during the move.
const SLOW: [&str; 2] = ["--bandwidth", "40mbit"];

/// Firmware that QEMU's packages bring, in flash.
const FIRMWARE: &str = "/usr/share/seabios/bios-256k.bin";

/// The file with the state of a TPM.
const TPM: &str = "tpm2-00.permall";

/// Returns the path of the firmware's variables on a host. Each host has a file of its own.
fn variables(stage: &Stage, host: usize) -> PathBuf {
    let host = stage.lab.host(host).unwrap();
    host.folder().join("variables.fd")
}

/// Returns what a guest's firmware has stored.
fn variables_of(guest: &str) -> Vec<u8> {
    let line = format!("the boot entries of {guest}\n");
    line.bytes().cycle().take(128 << 10).collect()
}

/// Returns the state of the guest's TPM on a host, where Longhaul has started it.
fn tpm_of(stage: &Stage, host: usize, guest: &str) -> PathBuf {
    let folder = stage.lab.host(host).unwrap().folder().join("state/tpms");
    folder.join(guest).join("state").join(TPM)
}

/// Prints the kernel's last words of QEMUs: one ended by itself, before any agent knew of it, and
/// a QEMU that is a daemon has nobody who learns why.
fn said_by_the_kernel(dmesg: &mut Command) {
    eprintln!("its QEMU ended by itself before it was attached to; the kernel said last:");
    let said = dmesg.output().map(|said| said.stdout).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let of_qemu = said.lines().filter(|line| {
        let words = ["qemu", "oom", "segfault", "killed"];
        let line = line.to_lowercase();
        words.iter().any(|word| line.contains(word))
    });
    of_qemu.for_each(|line| eprintln!("{line}"));
}

/// A guest that a script started on the first host.
struct Script {
    guest: Running,
    folder: PathBuf,
}

impl Script {
    /// Adds names for the script's resources to both hosts' configurations, and runs it.
    fn run(stage: &mut Stage, name: &str, version: &str, machine: &str) -> Self {
        let disk = stage
            .lab
            .shared_folder()
            .unwrap()
            .join(format!("{name}.raw"));
        fs::write(&disk, vec![7; 1 << 20]).unwrap();
        for host in 0..2 {
            let config = stage.lab.host(host).unwrap().folder().join("agent.toml");
            let text = fs::read_to_string(&config).unwrap();
            let variables = variables(stage, host);
            let image = format!(
                "\n[images.{name}]\npath = {disk:?}\nformat = \"raw\"\ndirect = false\n\
                 [images.variables]\npath = {variables:?}\nformat = \"raw\"\nlocal = true\n\
                 [firmware]\nseabios = {FIRMWARE:?}\n[networks]\nunplugged = \"none\"\n"
            );
            fs::write(&config, text + &image).unwrap();
            stage.product.agent_mut(host).unwrap().kill().unwrap();
        }
        stage.restart(&[0, 1]);
        let host = stage.lab.host(0).unwrap();
        fs::write(variables(stage, 0), variables_of(name)).unwrap();
        let folder = host.folder().join(name);
        fs::create_dir(&folder).unwrap();
        let accelerator = match stage.product.has_kvm(0).unwrap() {
            true => "kvm",
            false => "tcg",
        };
        // A script by an author without knowledge of Longhaul.
        let script = format!(
            "mkdir -p tpm\n\
             swtpm socket --tpm2 --tpmstate dir=$PWD/tpm --terminate --daemon \
             --ctrl type=unixio,path=$PWD/swtpm.sock\n\
             exec {qemu} -name guest={name},debug-threads=on -M {machine} -accel {accelerator} \
             -m 128 -smp 2 -display none -vnc unix:vnc.sock -daemonize -pidfile pid -monitor none \
             -kernel {kernel}/vmlinuz -initrd {host}/tiny.initramfs \
             -append 'console=ttyS0 quiet panic=-1' \
             -drive file={disk},if=virtio,format=raw -net none \
             -device virtio-net-pci,mac=52:54:00:00:00:01 \
             -device virtio-serial -chardev socket,id=c,path=arena.sock,server=on,wait=off \
             -device virtserialport,chardev=c,name={CHANNEL_NAME} \
             -chardev socket,id=t,path=$PWD/swtpm.sock -tpmdev emulator,id=tpm,chardev=t \
             -device tpm-tis,tpmdev=tpm \
             -object rng-random,filename=/dev/urandom,id=r -device virtio-rng-pci,rng=r \
             -device qemu-xhci -device usb-tablet \
             -object iothread,id=io -device virtio-balloon,free-page-hint=on,iothread=io \
             -drive if=pflash,format=raw,readonly=on,file={FIRMWARE} \
             -drive if=pflash,format=raw,file={variables} \
             -rtc driftfix=slew -qmp unix:qmp.sock,server,nowait\n",
            variables = variables(stage, 0).display(),
            qemu = installed::qemu(version).unwrap().display(),
            kernel = installed::kernel().unwrap().display(),
            host = host.folder().display(),
            disk = disk.display(),
        );
        fs::write(folder.join("start.sh"), script).unwrap();
        let mut guest = Running {
            name: name.to_owned(),
            arena: Arena::new(),
        };
        guest.arena.attach(&folder.join("arena.sock")).unwrap();
        guest.arena.attach(&guest.socket(stage, 1)).unwrap();
        let start = || {
            let mut command = Command::new("sh");
            command.arg("start.sh").current_dir(&folder);
            host.output(&mut command).unwrap();
        };
        let end = || {
            if stage.qemus(0, name).is_empty() {
                return said_by_the_kernel(&mut Command::new("dmesg"));
            }
            Monitor::connect(&folder.join("qmp.sock")).ask("quit");
            assert!(wait_until(LIMIT, || stage.qemus(0, name).is_empty()));
        };
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes: 16 << 20,
            working_set_bytes: 4 << 20,
            pages_per_s: 200,
            write_bytes: 512,
            writers: 2,
            verify_pages_per_s: 50,
            seed: 7,
        };
        boot(&mut guest.arena, &workload, start, end);
        Self { guest, folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("qmp.sock")
    }

    fn attach(&self, stage: &Stage) {
        let socket = self.socket().display().to_string();
        let words = ["guests", "attach", &self.guest.name, "--qmp", &socket];
        let guest: longhaul_api::Guest = stage.product.ask(0, &words).unwrap();
        assert!(guest.attached);
        assert_eq!(guest.state, GuestState::Running);
        let pid = fs::read_to_string(self.folder.join("pid")).unwrap();
        assert_eq!(guest.pid.unwrap().to_string(), pid.trim());
    }

    /// Returns all settings of its QEMU that a move could have changed.
    fn settings(&self) -> Vec<Value> {
        let mut qmp = Monitor::connect(&self.socket());
        let mut capabilities = qmp.ask("query-migrate-capabilities");
        let list = capabilities.as_array_mut().unwrap();
        list.sort_by_key(|one| one["capability"].to_string());
        let mut chardevs = qmp.ask("query-chardev");
        let list = chardevs.as_array_mut().unwrap();
        list.sort_by_key(|one| one["label"].to_string());
        list.iter_mut()
            .for_each(|one| one["filename"] = Value::Null);
        let nodes = qmp.ask("query-named-block-nodes");
        let nodes: Vec<Value> = nodes
            .as_array()
            .unwrap()
            .iter()
            .map(|node| json!([node["node-name"], node["file"], node["drv"]]))
            .collect();
        vec![
            capabilities,
            qmp.ask("query-migrate-parameters"),
            qmp.ask("query-status"),
            chardevs,
            nodes.into(),
        ]
    }
}

/// Asserts that a plan and a move are refused while another file has the name of the variables.
fn another_file_of_variables_is_refused(stage: &Stage, script: &Script) {
    let (file, name) = (variables(stage, 0), &script.guest.name);
    let aside = file.with_extension("aside");
    fs::rename(&file, &aside).unwrap();
    fs::write(&file, variables_of("another")).unwrap();
    let why = "it is not the file that its QEMU uses";
    let to = stage.lab.host(1).unwrap().name();
    let mut plan = stage.product.agent(0).unwrap().command().unwrap();
    let planned = plan.args(["--json", "plan", name, "--to", to]).output();
    let planned = String::from_utf8(planned.unwrap().stdout).unwrap();
    assert!(planned.contains(why), "{planned}");
    let moving = script.guest.migrate(stage, 0, &[]);
    let refused = moving.finish(LIMIT).unwrap();
    assert!(refused.why().contains(why), "{}", refused.why());
    fs::rename(&aside, &file).unwrap();
}

/// Two of the four pairs each day.
#[test]
fn a_script_s_guest_is_moved_and_verified() {
    for (turn, qemus, machine) in [
        (0, ["10.0", "10.0"], "q35"),
        (0, ["7.2", "10.0"], "pc-q35-7.2"),
        (1, ["7.2", "7.2"], "pc"),
        // The requirements of this balloon there: docs/decisions/0009.
        (1, ["11.1", "11.1"], "q35"),
    ] {
        if !installed::is_its_day(turn, 2) {
            continue;
        }
        let Some(mut stage) = Stage::new("attach", qemus, LINK) else {
            continue;
        };
        let mut script = Script::run(&mut stage, "foreign", qemus[0], machine);
        if qemus[0] == qemus[1] {
            a_destination_that_dies_leaves_nothing_of_a_tpm(&mut stage, &mut script);
            a_move_that_is_stopped_leaves_it_as_it_was(&stage, &mut script);
        }
        script.attach(&stage);
        let host = stage.lab.host(1).unwrap().name().to_owned();
        let plan: longhaul_api::Plan = stage
            .product
            .ask(0, &["plan", "foreign", "--to", &host])
            .unwrap();
        assert!(plan.possible, "{:#?}", plan.checks);
        let display = "the guest's display (VNC at vnc.sock) stays behind";
        let mut checks = plan.checks.iter();
        assert!(
            checks.any(|check| check.message.starts_with(display)),
            "{:#?}",
            plan.checks
        );
        if qemus[0] == qemus[1] && machine == "pc" {
            another_file_of_variables_is_refused(&stage, &script);
        }
        let finished = script
            .guest
            .migrate(&stage, 0, &["--verify"])
            .finish(LIMIT)
            .unwrap();
        assert!(finished.completed(), "{}", finished.why());
        let verify = finished.report.as_ref().unwrap().verify.as_ref().unwrap();
        assert_eq!(verify.different_blocks, 0, "{verify:?}");
        script.guest.assert_moved(&stage, 0, &finished);
        let tpm = fs::read(script.folder.join("tpm").join(TPM)).unwrap();
        assert!(tpm.iter().any(|byte| *byte != 0));
        assert!(fs::read(tpm_of(&stage, 1, "foreign")).unwrap() == tpm);
        let stored = fs::read(variables(&stage, 1)).unwrap();
        assert!(stored == variables_of("foreign"), "other variables came");
        assert!(!variables(&stage, 0).exists(), "they stay under their name");
        // It is an ordinary guest from here on, and moves back into Longhaul's own folder.
        script
            .guest
            .arena
            .attach(&script.guest.socket(&stage, 0))
            .unwrap();
        script.guest.move_verified(&stage, 1);
        assert!(fs::read(tpm_of(&stage, 0, "foreign")).unwrap() == tpm);
        let tpms = stage.lab.host(1).unwrap().folder().join("state/tpms");
        let gone = || fs::read_dir(&tpms).unwrap().next().is_none();
        assert!(wait_until(LIMIT, gone), "its secrets stay behind");
        let stored = fs::read(variables(&stage, 0)).unwrap();
        assert!(stored == variables_of("foreign"), "other variables came");
        script.guest.end(&stage);
    }
}

/// Attaches, and detaches after the destination's agent has died with the TPM started.
fn a_destination_that_dies_leaves_nothing_of_a_tpm(stage: &mut Stage, script: &mut Script) {
    let name = script.guest.name.clone();
    script.attach(stage);
    let emulators = |stage: &Stage| {
        let folder = tpm_of(stage, 1, &name).parent().unwrap().to_owned();
        let wanted = format!("dir={},mode=0600", folder.display());
        let host = stage.lab.host(1).unwrap();
        let processes = host.namespace().processes().unwrap();
        let lines = processes.into_iter().map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).into_owned()
        });
        (
            lines.filter(|line| line.contains(&wanted)).count(),
            folder.exists(),
        )
    };
    // Before anything is copied, and when the guest is stopped and its TPM's state is there.
    for point in ["before-send:accepted", "after-record:ready"] {
        let (product, host) = (&mut stage.product, stage.lab.host(1).unwrap());
        let agent = product.agent_mut(1).unwrap();
        let armed = format!("destination:{point}=kill");
        agent.restart_to_fail(host, &armed).unwrap();
        let moving = script.guest.migrate(stage, 0, &[]);
        let died = || stage.product.agent_mut(1).unwrap().has_ended();
        assert!(wait_until(LIMIT, died));
        assert_eq!(emulators(stage), (1, true));
        stage.restart(&[1]);
        let finished = moving.finish(LIMIT).unwrap();
        assert!(!finished.completed());
        let gone = wait_until(LIMIT, || emulators(stage) == (0, false));
        assert!(gone, "{point}: {:?}", emulators(stage));
        script.guest.assert_nothing_on(stage, 1);
        script.guest.arena.forget_beats();
        script.guest.arena.wait_for_beat(LIMIT).unwrap();
    }
    let agent = stage.product.agent(0).unwrap();
    agent.run(&["guests", "detach", &name]).unwrap();
}

/// Attaches, stops a move, and detaches.
fn a_move_that_is_stopped_leaves_it_as_it_was(stage: &Stage, script: &mut Script) {
    let name = script.guest.name.clone();
    let before = script.settings();
    script.attach(stage);
    assert_eq!(
        script.settings(),
        before,
        "{name}: attaching changed something"
    );
    let mut moving = script.guest.migrate(stage, 0, &SLOW);
    assert!(
        moving.wait_for_phase(Phase::Precopy, LIMIT),
        "{}",
        moving.so_far().why()
    );
    let agent = stage.product.agent(0).unwrap();
    agent.run(&["cancel", &name]).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert_eq!(
        finished.outcome,
        Some(Outcome::Aborted),
        "{}",
        finished.why()
    );
    assert_eq!(
        script.settings(),
        before,
        "{name}: the move changed something"
    );
    script.guest.assert_nothing_on(stage, 1);
    let tpm = tpm_of(stage, 1, &name);
    assert!(!tpm.parent().unwrap().exists());
    assert!(variables(stage, 0).exists() && !variables(stage, 1).exists());
    agent.run(&["guests", "detach", &name]).unwrap();
    let guests = stage.lab.host(0).unwrap().folder().join("state/guests");
    assert!(!guests.join(&name).exists());
    assert_eq!(stage.product.guest(0, &name).unwrap(), None);
    script.guest.arena.wait_for_beat(LIMIT).unwrap();
    assert_eq!(script.guest.arena.verify(LIMIT).unwrap().errors, 0);
    assert_eq!(stage.qemus(0, &name).len(), 1);
}
