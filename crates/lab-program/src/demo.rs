//! Implements `lab demo`: a running guest moves to another host and back, then QEMU moves it, side
//! by side.

use longhaul_lab::arena::Workload;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::{DiskKind, LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::product::{Product, Settings, channel_socket};
use longhaul_lab_bench::moves::{Case, Launcher, Load, LonghaulMover, MoveRow, PeerMover, Show};
use longhaul_lab_bench::peer::PeerSystem;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

const LINK: &str = "100mbit,20ms";
/// The only version that the demo needs.
pub(crate) const QEMU: &str = "10.0";
const GUEST: &str = "web-7";
const DIRTY_SHARE: f64 = 0.3;
const ARENA_BYTES: u64 = 96 << 20;
const WORKING_SET_BYTES: u64 = 32 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 32 << 20;
/// Operations on the disk per second: about a tenth of the link's rate is written.
const DISK_OPERATIONS_PER_S: u64 = 25;
/// The number of operations done at full speed before, so that the disk has content when it moves.
const DISK_OPERATIONS_BEFORE: u64 = 400;

/// Demonstrates Longhaul on this machine, in less than 6 minutes. Exit status 1 where a move failed
/// or the guest's memory was damaged.
///
/// # Errors
/// When the laboratory cannot be made.
pub(crate) fn run() -> Result<ExitCode, LabError> {
    let link: LinkSpec = LINK
        .parse()
        .map_err(|error| LabError::Which(format!("{error}")))?;
    title("Two hosts on this machine, lyon and paris, and a slow link between them")?;
    let plan = Plan {
        purpose: "demo".to_owned(),
        hosts: 2,
        link,
        seed: 1,
    };
    let mut lab = Lab::create(&plan)?;
    let measured = lab.measure_link(link)?;
    tell(&format!(
        "asked for 100 Mbit/s and 20 ms round trip; measured {:.1} Mbit/s and {:.1} ms",
        measured.rate_bps / 1e6,
        measured.rtt_ms
    ))?;
    let kind: DiskKind = "raw".parse().map_err(LabError::Which)?;
    let disks = local_disks(lab.host(0)?.folder(), DISK_BYTES, &[kind]);
    disks.iter().try_for_each(LocalDisk::create)?;
    let files = KernelFiles::make_with_history(lab.host(0)?.folder())?;
    let settings = Settings {
        qemus: vec![QEMU.to_owned()],
        accelerator: "auto".to_owned(),
    };
    let folders: Vec<_> = lab
        .hosts()
        .iter()
        .map(|host| host.folder().to_owned())
        .collect();
    let images = |host: usize| images_in(&folders[host], &disks);
    let product = Product::start_each_with(&mut lab, &files, &settings, images)?;
    tell("each host runs its own agent (longhaul agent); each trusts the other's key")?;

    let kvm = product.has_kvm(0)?;
    let case = case(link)?;
    let longhaul = LonghaulMover {
        lab: &lab,
        product: &product,
    };
    let (rows, disk_is_right) = move_by_longhaul(&longhaul, &case, &disks, kvm)?;

    title("The same guest, without its disk, over the same link by QEMU's own pre-copy")?;
    let qemu = installed::qemu(QEMU)?;
    let accelerator = if kvm { "kvm" } else { "tcg" };
    let launcher = Launcher {
        lab: &lab,
        files: &files,
        qemus: [qemu.clone(), qemu],
        accelerator,
        disks: Vec::new(),
    };
    let peers = PeerMover {
        launcher: &launcher,
    };
    tell("$ QMP migrate, max-bandwidth 0, downtime-limit 300")?;
    let peer = peers.run(&case, PeerSystem::Default)?;
    tell(&one_line(&peer))?;

    let [there, back] = &rows;
    print(&report(there, back, &peer))?;
    let sound = rows
        .iter()
        .all(|row| row.is_completed() && row.verify_errors == Some(0));
    Ok(ExitCode::from(u8::from(!sound || !disk_is_right)))
}

/// Returns a host's configuration for the images of the guest's disks: each host has its own.
fn images_in(folder: &Path, disks: &[LocalDisk]) -> toml::Table {
    let image = |disk: &LocalDisk| {
        let name = disk.path.file_name().unwrap_or_default();
        let table = toml::Table::from_iter([
            (
                "path".to_owned(),
                folder.join(name).display().to_string().into(),
            ),
            ("format".to_owned(), disk.kind.format.name().into()),
        ]);
        (disk.image.clone(), toml::Value::from(table))
    };
    let images: toml::Table = disks.iter().map(image).collect();
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

/// Returns a workload like a database's on the guest's disk.
fn task(disks: &[LocalDisk]) -> Task<'_> {
    let work = Work {
        operations_per_s: DISK_OPERATIONS_PER_S,
        paced_from: DISK_OPERATIONS_BEFORE,
        ..Work::default()
    };
    Task {
        disks,
        seed: 7,
        depth: 4,
        work,
    }
}

fn tiny(version: &str) -> Tiny {
    let mut guest = Tiny::new(GUEST);
    guest.memory_mib = 256;
    guest.machine_version = version.split('.').take(2).collect::<Vec<_>>().join(".");
    guest
}

fn case(link: LinkSpec) -> Result<Case, LabError> {
    let guest = tiny(&installed::qemu_version(&installed::qemu(QEMU)?)?);
    let arena = Workload {
        content: "mix".to_owned(),
        arena_bytes: ARENA_BYTES,
        working_set_bytes: WORKING_SET_BYTES,
        pages_per_s: Case::pages_per_s(link, DIRTY_SHARE),
        write_bytes: 512,
        writers: 1,
        verify_pages_per_s: 1000,
        seed: 1,
    };
    Ok(Case {
        guest: guest.description(),
        load: Load::Arena {
            arena,
            dirty_share: DIRTY_SHARE,
        },
        link,
        downtime_ms: 300,
        limit: LIMIT,
        repeat: 1,
    })
}

fn move_by_longhaul(
    longhaul: &LonghaulMover<'_>,
    case: &Case,
    disks: &[LocalDisk],
    kvm: bool,
) -> Result<([MoveRow; 2], bool), LabError> {
    title(&format!("A guest, {GUEST}, starts on lyon"))?;
    let case = &with_disks(case, disks)?;
    let task = task(disks);
    let history = History::new(&task);
    for host in longhaul.lab.hosts() {
        history.listen_beside(|channel| channel_socket(host, GUEST, channel))?;
    }
    let mut guest = longhaul.boot(case)?;
    history.begin_beside(&mut guest.arena, &task)?;
    let usual = DISK_OPERATIONS_PER_S * longhaul_lab_bench::measure::BEFORE.as_secs();
    history.wait_for(DISK_OPERATIONS_BEFORE + usual, LIMIT)?;
    tell(&format!(
        "QEMU {QEMU} with {}; 256 MiB of memory; its workload keeps {} MiB of pages with \
         checksums, rewrites {} of them per second ({:.0} % of the link's rate), and verifies \
         them for ever",
        if kvm {
            "KVM"
        } else {
            "TCG (this machine has no usable KVM)"
        },
        ARENA_BYTES >> 20,
        case.load.arena().pages_per_s,
        DIRTY_SHARE * 100.0
    ))?;
    tell(&format!(
        "and a disk of {} MiB that only lyon has, to which it writes as a database would: at \
         random places, with flushes and barriers; every sector can be judged from outside",
        DISK_BYTES >> 20
    ))?;

    title(&format!("{GUEST} moves to paris while it runs"))?;
    shown(longhaul, 0, &["plan", GUEST, "--to", "paris"])?;
    tell(&format!("$ longhaul migrate {GUEST} --to paris"))?;
    let there = longhaul.move_once(case, &mut guest, [0, 1], Show::Display)?;
    tell(&one_line(&there))?;
    shown(longhaul, 0, &["report"])?;

    title(&format!("{GUEST} moves back to lyon"))?;
    guest
        .arena
        .start(case.load.arena(), Duration::from_secs(60))
        .map_err(|error| LabError::Which(error.to_string()))?;
    longhaul_lab::interrupt::sleep(longhaul_lab_bench::measure::BEFORE)?;
    tell(&format!("$ longhaul migrate {GUEST} --to lyon"))?;
    let back = longhaul.move_once(case, &mut guest, [1, 0], Show::Display)?;
    tell(&one_line(&back))?;
    history.stop_beside(&mut guest.arena)?;
    longhaul.end(case)?;
    let is_right = judge(longhaul, history)?;
    Ok(([there, back], is_right))
}

/// Returns the guest with its disks, and the workload that writes to them.
fn with_disks(case: &Case, disks: &[LocalDisk]) -> Result<Case, LabError> {
    let version = installed::qemu_version(&installed::qemu(QEMU)?)?;
    Ok(Case {
        guest: description(&tiny(&version), disks),
        ..case.clone()
    })
}

/// Judges the guest's final disk.
fn judge(longhaul: &LonghaulMover<'_>, history: History) -> Result<bool, LabError> {
    let record = history.finish()?;
    let judgement = record.judge(longhaul.lab.host(0)?.folder())?;
    let is_right = judgement.findings.is_empty() && record.errors == 0;
    tell(&match is_right {
        true => format!(
            "the disk, after both moves: {} operations, {} sectors judged from outside: every one \
             holds what it must",
            record.done, judgement.sectors
        ),
        false => format!(
            "the disk is damaged: {} sectors are wrong, the first: {:?}",
            judgement.wrong_sectors,
            judgement.findings.first()
        ),
    })?;
    Ok(is_right)
}

/// Runs one of the product's commands with its output on this terminal.
fn shown(longhaul: &LonghaulMover<'_>, host: usize, words: &[&str]) -> Result<(), LabError> {
    tell(&format!("$ longhaul {}", words.join(" ")))?;
    let mut command = longhaul.product.agent(host)?.command()?;
    // Its output, also that of a failure, is on the screen.
    command
        .args(words)
        .status()
        .during(|| format!("run longhaul {}", words.join(" ")))?;
    longhaul_lab::interrupt::check()
}

fn one_line(row: &MoveRow) -> String {
    let verified = match row.verify_errors {
        Some(0) => "the guest verified all its pages: no error".to_owned(),
        Some(errors) => format!("the guest found {errors} damaged pages"),
        None => "the guest does not answer".to_owned(),
    };
    format!("{}; {verified}", row.outcome)
}

fn report(there: &MoveRow, back: &MoveRow, peer: &MoveRow) -> String {
    let rows = [there, back, peer];
    let line = |name: &str, figure: &dyn Fn(&MoveRow) -> String| {
        let [there, back, peer] = rows.map(figure);
        format!("{name:<34}{there:>14}{back:>14}{peer:>16}\n")
    };
    let unit = |value: Option<f64>, unit: &str, digits: usize| {
        value.map_or_else(
            || "-".to_owned(),
            |value| format!("{value:.digits$} {unit}"),
        )
    };
    let mut text = String::from("\n");
    text += &format!(
        "{:<34}{:>14}{:>14}{:>16}\n",
        "", "Longhaul", "Longhaul", "QEMU's own"
    );
    text += &format!(
        "{:<34}{:>14}{:>14}{:>16}\n",
        "", "to paris", "back to lyon", "pre-copy"
    );
    text += &line("data over the link", &|row| {
        unit(row.link_bytes.map(|bytes| bytes as f64 / 1e6), "MB", 1)
    });
    text += &line("time", &|row| unit(row.total_ms.map(|ms| ms / 1e3), "s", 1));
    text += &line("downtime, seen from outside", &|row| {
        unit(row.downtime_ms, "ms", 0)
    });
    text += &line("guest's work meanwhile", &|row| {
        let share = row.work_during_per_s.zip(row.work_before_per_s);
        unit(
            share
                .filter(|(_, before)| *before > 0.0)
                .map(|(during, before)| during / before * 100.0),
            "%",
            0,
        )
    });
    text += &line("pages that the guest found damaged", &|row| {
        row.verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string())
    });
    text += &line("agents' memory (both, at most)", &|row| {
        let bytes = row
            .agent_peak_bytes
            .source
            .zip(row.agent_peak_bytes.destination);
        unit(
            bytes.map(|(source, destination)| (source + destination) as f64 / 1e6),
            "MB",
            0,
        )
    });
    text
}

fn title(text: &str) -> Result<(), LabError> {
    print(&format!("\n== {text}\n"))
}

fn tell(text: &str) -> Result<(), LabError> {
    print(&format!("{text}\n"))
}

fn print(text: &str) -> Result<(), LabError> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .during(|| "print".to_owned())
}
