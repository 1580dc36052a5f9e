//! `lab bench memory`: Longhaul and QEMU's own ways move the same guest over the same link.

mod rates;
mod systems;

use super::document::{Document, Sense, median};
use super::{Bench, Options};
use crate::error::LabError;
use crate::guest::warm::{SystemGuest, images};
use crate::guest::{Chipset, KernelFiles, network};
use crate::installed;
use crate::lab::{Lab, Plan};
use crate::link::spec::LinkSpec;
use crate::moves::{Case, Launcher, Load, LonghaulMover, MoveRow, PeerMover};
use crate::peer::PeerSystem;
use crate::product::{Product, Settings};
use std::path::{Path, PathBuf};

/// The bench as `lab bench --list` shows it.
pub(super) const BENCH: Bench = Bench {
    name: "memory",
    about: "a guest's memory moved by Longhaul and by QEMU's own ways, at five dirty rates; with \
            --guest debian under real workloads",
    minutes: (25, 4),
    run,
};

const LINK: &str = "100mbit,20ms";
const ASKED_DOWNTIME_MS: u64 = 300;

/// Measures, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let guest = match options.guest.as_str() {
        "tiny" => None,
        "debian" => Some(SystemGuest::debian()?),
        path if path.ends_with(".toml") => Some(SystemGuest::described(Path::new(path))?),
        other => {
            return Err(LabError::Which(format!(
                "there is no guest `{other}`: tiny, debian, or a FILE.toml that describes one"
            )));
        }
    };
    let systems = systems(options, guest.is_some())?;
    let link = options.link_or(LINK)?;
    let plan = Plan {
        purpose: "bench memory".to_owned(),
        hosts: 2,
        link,
        seed: options.seed,
    };
    let mut lab = Lab::create(&plan)?;
    document.add_link(link, lab.measure_link(link)?);
    let mut disks = Vec::new();
    if let Some(guest) = &guest {
        let workloads = systems::workloads(options, guest);
        if workloads.iter().any(|name| guest.has_clients(name)) {
            lab.add_clients()?;
        }
        let moves = workloads.len() * options.repeats() as usize;
        disks = images(moves, &lab.shared_folder()?);
    }
    let files = KernelFiles::make(lab.host(0)?.folder())?;
    let product = match systems.contains(&System::Longhaul) {
        true => Some(product(&mut lab, &files, &disks, options)?),
        false => None,
    };
    // Peers run as Longhaul's guests do.
    let kvm = product
        .as_ref()
        .map_or(Ok(false), |product| product.has_kvm(0))?;
    let accelerator = if kvm { "kvm" } else { "tcg" };
    let binary = installed::qemu(&options.qemu)?;
    let version = installed::qemu_version(&binary)?;
    document.machine_mut().accel = Some(accelerator.to_owned());
    document.machine_mut().qemu = Some(version.clone());

    let launcher = Launcher {
        lab: &lab,
        files: &files,
        qemus: [binary.clone(), binary],
        accelerator,
        disks,
    };
    let movers = Movers {
        longhaul: product
            .as_ref()
            .map(|product| LonghaulMover { lab: &lab, product }),
        launcher: &launcher,
    };
    let chipset = Chipset::named(&options.machine).unwrap_or(Chipset::Q35);
    let machine = chipset.machine_type(&major_minor(&version));
    let asked = Asked {
        options,
        link,
        machine,
    };
    match guest {
        None => rates::measure(&asked, &systems, &movers, document),
        Some(guest) => systems::measure(&asked, &guest, &systems, &movers, document),
    }
}

/// What a run of the bench was asked for.
struct Asked<'a> {
    options: &'a Options,
    link: LinkSpec,
    machine: String,
}

fn product(
    lab: &mut Lab,
    files: &KernelFiles,
    disks: &[(String, PathBuf)],
    options: &Options,
) -> Result<Product, LabError> {
    let settings = Settings {
        qemus: vec![options.qemu.clone()],
        accelerator: "auto".to_owned(),
    };
    let image = |(name, path): &(String, PathBuf)| {
        let image = toml::Table::from_iter([
            ("path".to_owned(), path.display().to_string().into()),
            ("format".to_owned(), "raw".into()),
        ]);
        (name.clone(), toml::Value::from(image))
    };
    let images: toml::Table = disks.iter().map(image).collect();
    let mut more = toml::Table::from_iter([("images".to_owned(), images.into())]);
    if lab.clients().is_ok() {
        let bridge = [("bridge".to_owned(), network::BRIDGE.into())];
        let networks = [(
            network::NETWORK.to_owned(),
            toml::Table::from_iter(bridge).into(),
        )];
        let networks = toml::Table::from_iter(networks);
        more.insert("networks".to_owned(), networks.into());
    }
    Product::start_with(lab, files, &settings, &more)
}

/// Everybody who can move a guest.
struct Movers<'a> {
    longhaul: Option<LonghaulMover<'a>>,
    launcher: &'a Launcher<'a>,
}

impl Movers<'_> {
    /// Lets one of them move a case's guest, and notes how it went.
    fn add_row(
        &self,
        case: &Case,
        system: System,
        document: &mut Document,
    ) -> Result<MoveRow, LabError> {
        let launcher = self.launcher;
        let row = match (system, &self.longhaul, &case.load) {
            (System::Peer(system), ..) => PeerMover { launcher }.run(case, system)?,
            (System::Longhaul, Some(longhaul), Load::Arena { .. }) => longhaul.run(case)?,
            (System::Longhaul, Some(longhaul), Load::Warm(_)) => {
                longhaul.run_attached(case, launcher)?
            }
            (System::Longhaul, None, _) => {
                return Err(LabError::Which("no agents were started".to_owned()));
            }
        };
        document.add_row(&row, &show(&row));
        Ok(row)
    }
}

/// Who moves the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Longhaul,
    Peer(PeerSystem),
}

fn systems(options: &Options, has_system: bool) -> Result<Vec<System>, LabError> {
    let peers: &[PeerSystem] = match (has_system, options.quick) {
        (false, _) => &[PeerSystem::Default],
        (true, true) => &[PeerSystem::Default, PeerSystem::MultifdZstd],
        (true, false) => &[
            PeerSystem::MultifdZstd,
            PeerSystem::Default,
            PeerSystem::Xbzrle,
        ],
    };
    if options.system.is_empty() {
        let peers = peers.iter().copied().map(System::Peer);
        return Ok([System::Longhaul].into_iter().chain(peers).collect());
    }
    let named = |name: &String| {
        let peer = PeerSystem::ALL.into_iter().find(|peer| peer.name() == name);
        match (name.as_str(), peer) {
            ("longhaul", _) => Ok(System::Longhaul),
            (_, Some(peer)) => Ok(System::Peer(peer)),
            _ => Err(LabError::Which(format!(
                "this bench has no system `{name}`: it has longhaul, {}",
                PeerSystem::ALL.map(PeerSystem::name).join(", ")
            ))),
        }
    };
    options.system.iter().map(named).collect()
}

fn major_minor(version: &str) -> String {
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

fn show(row: &MoveRow) -> String {
    let number = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
    };
    let kind = match row.parameters.dirty_rate_of_link {
        Some(rate) => format!("{:<6} dirty {rate:.1} of link", row.workload),
        None => row.workload.clone(),
    };
    let share = row.work_during_per_s.zip(row.work_before_per_s);
    let share = share.filter(|(_, before)| *before > 0.0);
    let share = share.map(|(during, before)| during / before * 100.0);
    let clients = row.responses.as_ref().map_or_else(String::new, |seen| {
        format!(
            "clients' responses {} before and {} during, none for {}, ",
            number(seen.before_ms, "ms"),
            number(seen.during_ms, "ms"),
            number(seen.longest_gap_ms, "ms")
        )
    });
    format!(
        "{:<18} {}, repeat {}: {} over the link, {}, downtime {}, work {} of before, {clients}errors {}, {}",
        row.system,
        kind,
        row.repeat,
        number(row.link_bytes.map(|bytes| bytes as f64 / 1e6), "MB"),
        number(row.total_ms.map(|ms| ms / 1e3), "s"),
        number(row.downtime_ms, "ms"),
        number(share, "%"),
        row.verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
        row.outcome,
    )
}

/// Only moves that went through, of guests that found nothing wrong, are compared.
fn counts(row: &MoveRow) -> bool {
    row.is_completed() && row.verify_errors == Some(0)
}

fn ratio(
    ours: &[&MoveRow],
    theirs: &[&MoveRow],
    value: impl Fn(&MoveRow) -> Option<f64>,
) -> Option<f64> {
    let middle = |rows: &[&MoveRow]| median(rows.iter().filter_map(|row| value(row)));
    Some(middle(ours)? / middle(theirs)?)
}

/// What every run has to show of Longhaul's own rows: nothing damaged, nothing that failed.
fn judge_own(rows: &[MoveRow], document: &mut Document) {
    let own = || rows.iter().filter(|row| row.system == "longhaul");
    // A row whose guest could not be asked is as bad as one with an error.
    let errors = own()
        .map(|row| row.verify_errors.map_or(f64::NAN, |errors| errors as f64))
        .sum();
    document.add_check("verify_errors.longhaul", Some(errors), Sense::AtMost, 0.0);
    let failed = own().filter(|row| !row.is_completed()).count();
    document.add_check(
        "not_completed.longhaul",
        Some(failed as f64),
        Sense::AtMost,
        0.0,
    );
}
