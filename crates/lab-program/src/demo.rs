//! Implements `lab demo`: a running guest moves between sites behind NATs and back, while a client
//! at a third site uses it; then QEMU moves it over a plain link, side by side.

use longhaul_lab::arena::Workload;
use longhaul_lab::clients::{Client, Seen, session, steady_download};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::{DiskKind, LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny, network};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::internet::access::ParseAccessError;
use longhaul_lab::internet::{SitePlan, SitesPlan};
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Product, Settings, channel_socket};
use longhaul_lab::realm::{Realm, path_to};
use longhaul_lab_bench::moves::{Case, Launcher, Load, LonghaulMover, MoveRow, PeerMover, Show};
use longhaul_lab_bench::peer::PeerSystem;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// The uplink of each site: two sites are both apart.
const UPLINK: &str = "100mbit,10ms";
/// The same between two hosts without sites.
const LINK: &str = "100mbit,20ms";
/// The sites' NATs. The third has the client's host.
const SITES: [&str; 3] = ["port-restricted", "port-restricted", "none"];
/// The index of the client's host.
const CLIENT: usize = 2;
/// How long a rate is measured.
const RATE_OVER: Duration = Duration::from_secs(3);
/// How long hosts have to find direct paths.
const DIRECT_WITHIN: Duration = Duration::from_secs(60);
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

/// Demonstrates Longhaul on this machine, in two minutes. Exit status 1 where a move failed
/// or the guest's memory was damaged.
///
/// # Errors
/// When the laboratory cannot be made.
pub(crate) fn run() -> Result<ExitCode, LabError> {
    let link = spec(LINK)?;
    title("Three sites on this machine: lyon and paris behind NATs, oslo with a client")?;
    let mut lab = sites()?;
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
    tell("each host runs its own agent (longhaul agent); none has an open port")?;
    let realm = join(&mut lab, &product)?;

    let kvm = product.has_kvm(0)?;
    let case = case(link)?;
    let longhaul = LonghaulMover {
        lab: &lab,
        product: &product,
    };
    let (rows, service, disk_is_right) = move_by_longhaul(&longhaul, &case, &disks, kvm)?;
    drop(realm);
    drop(product);
    drop(lab);

    title(
        "The same guest, without its disk, by QEMU's own pre-copy, over a plain link without NATs",
    )?;
    let lab = plain(link)?;
    let files = KernelFiles::make_with_history(lab.host(0)?.folder())?;
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
    print(&service_report(&service))?;
    let sound = rows
        .iter()
        .all(|row| row.is_completed() && row.verify_errors == Some(0))
        && service.iter().all(Service::is_whole);
    Ok(ExitCode::from(u8::from(!sound || !disk_is_right)))
}

pub(crate) fn spec(text: &str) -> Result<LinkSpec, LabError> {
    text.parse()
        .map_err(|error| LabError::Which(format!("{error}")))
}

/// Creates the sites, and says how far they are apart.
fn sites() -> Result<Lab, LabError> {
    let uplink = spec(UPLINK)?;
    let site = |access: &&str| {
        Ok(SitePlan {
            access: access
                .parse()
                .map_err(|error: ParseAccessError| LabError::Which(error.to_string()))?,
            uplink,
        })
    };
    let plan = SitesPlan {
        purpose: "demo".to_owned(),
        sites: SITES.iter().map(site).collect::<Result<_, LabError>>()?,
        servers: 1,
        backbone: uplink,
        seed: 1,
    };
    let lab = Lab::create_sites(&plan)?;
    let internet = lab.internet()?;
    let measured = internet.measure_uplink(internet.site(0)?)?;
    tell(&format!(
        "each site's uplink: asked for 100 Mbit/s and 10 ms round trip, measured {:.1} Mbit/s and \
         {:.1} ms; so two sites are 20 ms apart",
        measured.rate_bps / 1e6,
        measured.rtt_ms
    ))?;
    Ok(lab)
}

/// Joins the hosts to a realm with a network, to which a client of guests is attached.
fn join(lab: &mut Lab, product: &Product) -> Result<Realm, LabError> {
    tell("a rendezvous server on the Internet introduces them: longhaul rendezvous")?;
    let realm = Realm::create(lab)?;
    let agents = [product.agent(0)?, product.agent(1)?, product.agent(CLIENT)?];
    tell("$ longhaul host join TOKEN                 (on each host)")?;
    realm.join(lab, &agents)?;
    let network = network::NETWORK;
    tell(&format!(
        "$ longhaul network create {network}; longhaul network add {network} lyon-1 paris-1 oslo-1"
    ))?;
    realm.create_network(lab, network, &agents)?;
    let bridge = realm.bridge(agents[CLIENT], network)?;
    lab.add_clients_at(CLIENT, &bridge)?;
    // They are relayed until then.
    wait_until(DIRECT_WITHIN, || {
        let is_direct =
            |to| matches!(path_to(agents[0], to), Ok((Some(kind), _)) if kind == "direct");
        is_direct("paris-1") && is_direct("oslo-1")
    });
    tell("$ longhaul hosts                           (on lyon-1)")?;
    run_shown(product, 0, &["hosts"])?;
    Ok(realm)
}

/// Creates two hosts with a link between them.
fn plain(link: LinkSpec) -> Result<Lab, LabError> {
    let plan = Plan {
        purpose: "demo: QEMU's own".to_owned(),
        hosts: 2,
        link,
        seed: 1,
    };
    let lab = Lab::create(&plan)?;
    lab.measure_link(link)?;
    Ok(lab)
}

/// A client's two connections with the guest, around a move.
struct Using {
    download: Client,
    session: Client,
    before_bytes_per_s: f64,
    hosts: [usize; 2],
}

/// What the client saw of a move.
struct Service {
    download: Result<Seen, String>,
    session: Result<Seen, String>,
    before_bytes_per_s: f64,
    after_bytes_per_s: f64,
    way: String,
}

impl Using {
    fn start(longhaul: &LonghaulMover<'_>, hosts: [usize; 2]) -> Result<Self, LabError> {
        let clients = longhaul.lab.clients()?;
        let download = Client::start(clients, steady_download)?;
        let session = Client::start(clients, session)?;
        let served = |client: &Client| client.has_ended() || client.answers() > 10;
        wait_until(LIMIT, || served(&download) && served(&session));
        let before_bytes_per_s = rate(&download)?;
        tell("a client at oslo downloads from it, and types in a session with it, meanwhile")?;
        Ok(Self {
            download,
            session,
            before_bytes_per_s,
            hosts,
        })
    }

    fn finish(self, longhaul: &LonghaulMover<'_>) -> Result<Service, LabError> {
        let after_bytes_per_s = rate(&self.download)?;
        let [from, to] = self.hosts;
        let to = longhaul.lab.host(to)?.name();
        let (kind, _) = path_to(longhaul.product.agent(from)?, to)?;
        let text = |error: std::io::Error| error.to_string();
        Ok(Service {
            download: self.download.finish().map_err(text),
            session: self.session.finish().map_err(text),
            before_bytes_per_s: self.before_bytes_per_s,
            after_bytes_per_s,
            way: kind.unwrap_or_else(|| "not at all".to_owned()),
        })
    }
}

/// Returns the rate of a download now, in bytes per second.
fn rate(download: &Client) -> Result<f64, LabError> {
    let before = download.bytes();
    longhaul_lab::interrupt::sleep(RATE_OVER)?;
    Ok((download.bytes() - before) as f64 / RATE_OVER.as_secs_f64())
}

impl Service {
    fn is_whole(&self) -> bool {
        self.download.is_ok() && self.session.is_ok()
    }

    fn line(&self) -> String {
        let gap = |seen: &Result<Seen, String>| match seen {
            Ok(seen) => format!("{} ms", seen.longest_gap.as_millis()),
            Err(error) => format!("broken: {error}"),
        };
        format!(
            "the client's longest wait: {} in the download, {} in the session",
            gap(&self.download),
            gap(&self.session)
        )
    }
}

fn service_report([there, back]: &[Service; 2]) -> String {
    let gap = |seen: &Result<Seen, String>| match seen {
        Ok(seen) => format!("{} ms", seen.longest_gap.as_millis()),
        Err(_) => "broken".to_owned(),
    };
    let rate = |bytes_per_s: f64| format!("{:.1} Mbit/s", bytes_per_s * 8.0 / 1e6);
    let line = |name: &str, figure: &dyn Fn(&Service) -> String| {
        format!("{name:<34}{:>14}{:>14}\n", figure(there), figure(back))
    };
    let mut text = String::new();
    text += &line("client's longest wait, download", &|it| gap(&it.download));
    text += &line("client's longest wait, session", &|it| gap(&it.session));
    text += &line("download before", &|it| rate(it.before_bytes_per_s));
    text += &line("download after", &|it| rate(it.after_bytes_per_s));
    text += &line("lyon and paris were connected", &|it| it.way.clone());
    text += "\nthe client's traffic takes the same uplink, and is part of Longhaul's data\n";
    text
}

/// Returns a host's configuration for the images of the guest's disks: each host has its own.
pub(crate) fn images_in(folder: &Path, disks: &[LocalDisk]) -> toml::Table {
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
            name: arena.content.clone(),
            arena,
            dirty_share: Some(DIRTY_SHARE),
        },
        link,
        downtime_ms: 300,
        limit: LIMIT,
        force_after: None,
        observe: Duration::ZERO,
        repeat: 1,
    })
}

fn move_by_longhaul(
    longhaul: &LonghaulMover<'_>,
    case: &Case,
    disks: &[LocalDisk],
    kvm: bool,
) -> Result<([MoveRow; 2], [Service; 2], bool), LabError> {
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
    shown(longhaul, 0, &["plan", GUEST, "--to", "paris-1"])?;
    let using = Using::start(longhaul, [0, 1])?;
    tell(&format!("$ longhaul migrate {GUEST} --to paris-1"))?;
    let there = longhaul.move_once(case, &mut guest, [0, 1], Show::Display)?;
    tell(&one_line(&there))?;
    let service_there = using.finish(longhaul)?;
    tell(&service_there.line())?;
    shown(longhaul, 0, &["report"])?;

    title(&format!("{GUEST} moves back to lyon"))?;
    guest
        .arena
        .start(case.load.arena(), Duration::from_secs(60))
        .map_err(|error| LabError::Which(error.to_string()))?;
    longhaul_lab::interrupt::sleep(longhaul_lab_bench::measure::BEFORE)?;
    let using = Using::start(longhaul, [1, 0])?;
    tell(&format!("$ longhaul migrate {GUEST} --to lyon-1"))?;
    let back = longhaul.move_once(case, &mut guest, [1, 0], Show::Display)?;
    tell(&one_line(&back))?;
    let service_back = using.finish(longhaul)?;
    tell(&service_back.line())?;
    history.stop_beside(&mut guest.arena)?;
    longhaul.end(case)?;
    let is_right = judge(longhaul, history)?;
    Ok(([there, back], [service_there, service_back], is_right))
}

/// Returns the guest with its disks and its network card.
fn with_disks(case: &Case, disks: &[LocalDisk]) -> Result<Case, LabError> {
    let version = installed::qemu_version(&installed::qemu(QEMU)?)?;
    let mut guest = tiny(&version);
    guest.serves_clients = true;
    Ok(Case {
        guest: description(&guest, disks),
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
    run_shown(longhaul.product, host, words)
}

pub(crate) fn run_shown(product: &Product, host: usize, words: &[&str]) -> Result<(), LabError> {
    let mut command = product.agent(host)?.command()?;
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

pub(crate) fn title(text: &str) -> Result<(), LabError> {
    print(&format!("\n== {text}\n"))
}

pub(crate) fn tell(text: &str) -> Result<(), LabError> {
    print(&format!("{text}\n"))
}

pub(crate) fn print(text: &str) -> Result<(), LabError> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .during(|| "print".to_owned())
}
