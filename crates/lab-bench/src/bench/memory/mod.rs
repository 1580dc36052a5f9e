//! Implements `lab bench memory`: Longhaul and QEMU's own migration move the same guest over the
//! same link.

pub(super) mod back;
pub(super) mod group;
mod rates;
pub(super) mod strategies;
mod systems;

use super::document::{Document, Sense, median};
use super::{Bench, Options};
use crate::moves::{Case, Launcher, Load, LonghaulMover, MoveRow, PeerMover};
use crate::peer::PeerSystem;
use crate::warm::{SystemGuest, images};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{Chipset, KernelFiles, network};
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan, say};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::product::{Product, Settings};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "memory",
    about: "a guest's memory moved by Longhaul and by QEMU's own ways, at five dirty rates; with \
            --guest debian under real workloads",
    minutes: (25, 4),
    run,
};

const LINK: &str = "100mbit,20ms";
const ASKED_DOWNTIME_MS: u64 = 300;
/// The QEMU of baselines that the chosen one lacks, where a bench takes them nevertheless.
const NEWER_QEMU: &str = "11.1";

/// Runs the bench, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let guest = systems::guest(options)?;
    let version = installed::qemu_version(&installed::qemu(&options.qemu)?)?;
    let systems = systems(options, guest.is_some(), &version)?;
    on_ground(
        options,
        LINK,
        guest.as_ref(),
        &systems,
        toml::Table::new(),
        document,
        |asked, movers, document| match &guest {
            None => rates::measure(asked, &systems, movers, document),
            Some(guest) => systems::measure(asked, guest, &systems, movers, document),
        },
    )
}

/// Prepares everything that these systems need to move a guest, and runs the bench.
fn on_ground(
    options: &Options,
    link: &str,
    guest: Option<&SystemGuest>,
    systems: &[System],
    more: toml::Table,
    document: &mut Document,
    measure: impl FnOnce(&Asked<'_>, &Movers<'_>, &mut Document) -> Result<(), LabError>,
) -> Result<(), LabError> {
    let link = options.link_or(link)?;
    let plan = Plan {
        purpose: format!("bench {}", document.bench()),
        hosts: 2,
        link,
        seed: options.seed,
    };
    let mut lab = Lab::create(&plan)?;
    document.add_link(link, lab.measure_link(link)?);
    let (disks, local) = match guest {
        Some(guest) => disks(options, guest, systems, &mut lab)?,
        None => (Vec::new(), Vec::new()),
    };
    let files = KernelFiles::make(lab.host(0)?.folder())?;
    let ours = |system: &System| !matches!(system, System::Peer(_));
    let images = (&disks[..], &local[..]);
    let product = match systems.iter().any(ours) {
        true => Some(product(&mut lab, &files, images, (options, more))?),
        false => None,
    };
    let accelerator = accelerator(product.as_ref())?;
    let binary = installed::qemu(&options.qemu)?;
    let version = installed::qemu_version(&binary)?;
    document.machine_mut().accel = Some(accelerator.to_owned());
    document.machine_mut().qemu = Some(version.clone());

    let folder = lab.host(0)?.folder();
    let here = |name: &String| (name.clone(), folder.join(format!("{name}.img")));
    let launcher = |binary: &Path, disks| Launcher {
        lab: &lab,
        files: &files,
        qemus: [binary.to_owned(), binary.to_owned()],
        accelerator,
        disks,
    };
    let of_host = launcher(&binary, local.iter().map(here).collect());
    let newer = match systems.iter().any(|system| system.is_lacking(&version)) {
        true => Some(launcher(&installed::qemu(NEWER_QEMU)?, disks.clone())),
        false => None,
    };
    let launcher = launcher(&binary, disks);
    let movers = Movers {
        longhaul: product
            .as_ref()
            .map(|product| LonghaulMover { lab: &lab, product }),
        launcher: &launcher,
        of_host: &of_host,
        newer: newer.as_ref(),
        version: &version,
    };
    let chipset = Chipset::named(&options.machine).unwrap_or(Chipset::Q35);
    let machine = chipset.machine_type(&major_minor(&version));
    let asked = Asked {
        options,
        link,
        machine,
        guest,
    };
    measure(&asked, &movers, document)
}

/// Returns the accelerator of all guests: baselines run with the same one as Longhaul's.
fn accelerator(product: Option<&Product>) -> Result<&'static str, LabError> {
    let kvm = product.map_or(Ok(false), |product| product.has_kvm(0))?;
    Ok(if kvm { "kvm" } else { "tcg" })
}

/// Disk images: their names in configurations, and their files.
type Images = Vec<(String, PathBuf)>;

/// Adds what the workloads of a guest with a whole system need; returns the images of its disk, and
/// the names of those of local disks.
fn disks(
    options: &Options,
    guest: &SystemGuest,
    systems: &[System],
    lab: &mut Lab,
) -> Result<(Images, Vec<String>), LabError> {
    let workloads = systems::workloads(options, guest);
    if workloads.iter().any(|name| guest.has_clients(name)) {
        lab.add_clients()?;
    }
    let moves = workloads.len() * options.repeats() as usize;
    let of_disks = systems.iter().filter(|system| system.takes_disk()).count();
    let disks = images(moves, &lab.shared_folder()?);
    Ok((disks, local_images(moves * of_disks)))
}

/// The parameters of a run of the bench.
struct Asked<'a> {
    options: &'a Options,
    link: LinkSpec,
    machine: String,
    guest: Option<&'a SystemGuest>,
}

/// Returns the images of local disks, by their names in both hosts' configuration.
fn local_images(guests: usize) -> Vec<String> {
    (0..guests)
        .map(|number| format!("local-{number}"))
        .collect()
}

fn product(
    lab: &mut Lab,
    files: &KernelFiles,
    (disks, local): (&[(String, PathBuf)], &[String]),
    (options, mut more): (&Options, toml::Table),
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
    let shared: toml::Table = disks.iter().map(image).collect();
    let folders: Vec<PathBuf> = lab
        .hosts()
        .iter()
        .map(|it| it.folder().to_owned())
        .collect();
    let images = |host: usize| {
        let of_host = local.iter().map(|name| {
            let path = folders[host].join(format!("{name}.img"));
            let image = toml::Table::from_iter([
                ("path".to_owned(), path.display().to_string().into()),
                ("format".to_owned(), "raw".into()),
                ("direct".to_owned(), true.into()),
                ("local".to_owned(), true.into()),
            ]);
            (name.clone(), toml::Value::from(image))
        });
        shared
            .clone()
            .into_iter()
            .chain(of_host)
            .collect::<toml::Table>()
    };
    if lab.clients().is_ok() {
        let bridge = [("bridge".to_owned(), network::BRIDGE.into())];
        let networks = [(
            network::NETWORK.to_owned(),
            toml::Table::from_iter(bridge).into(),
        )];
        let networks = toml::Table::from_iter(networks);
        more.insert("networks".to_owned(), networks.into());
    }
    Product::start_each_with(lab, files, &settings, |host| {
        let mut tables = more.clone();
        tables.insert("images".to_owned(), images(host).into());
        tables
    })
}

/// All systems that can move a guest.
struct Movers<'a> {
    longhaul: Option<LonghaulMover<'a>>,
    launcher: &'a Launcher<'a>,
    /// Starts guests with a local disk of the first host.
    of_host: &'a Launcher<'a>,
    /// Starts guests of baselines that the chosen QEMU lacks, with a newer one.
    newer: Option<&'a Launcher<'a>>,
    /// The version of the chosen QEMU.
    version: &'a str,
}

impl Movers<'_> {
    /// Moves a case's guest with a baseline.
    fn move_by_peer(&self, case: &Case, system: PeerSystem) -> Result<MoveRow, LabError> {
        if system.is_in(self.version) {
            let launcher = self.launcher;
            return PeerMover { launcher }.run(case, system);
        }
        let lacks = || LabError::Which(lacks(self.version, system));
        let launcher = self.newer.ok_or_else(lacks)?;
        let mut row = PeerMover { launcher }.run(case, system)?;
        row.parameters.qemu = Some(installed::qemu_version(&launcher.qemus[0])?);
        Ok(row)
    }

    /// Moves a case's guest with one of them, and adds the row.
    fn add_row(
        &self,
        case: &Case,
        system: System,
        document: &mut Document,
    ) -> Result<MoveRow, LabError> {
        let row = match (system, &self.longhaul, &case.load) {
            (System::Peer(system), ..) => self.move_by_peer(case, system)?,
            (System::Longhaul, Some(longhaul), Load::Arena { .. }) => longhaul.run(case)?,
            (System::Longhaul, Some(longhaul), Load::Warm(_)) => {
                longhaul.run_attached(case, self.launcher, ("longhaul", &[]))?
            }
            (System::Strategy(strategy), Some(longhaul), Load::Arena { .. }) => {
                longhaul.run_as(case, (strategy, &strategies::words(strategy)))?
            }
            (System::Strategy(strategy), Some(_), Load::Warm(_)) => {
                let text = format!("{strategy} is compared with the guest tiny alone");
                return Err(LabError::Which(text));
            }
            (System::WithDisk { index }, Some(longhaul), Load::Warm(_)) => {
                let mut words = vec!["--disks", "precopy"];
                if !index {
                    words.push("--no-disk-references");
                }
                let row = longhaul.run_attached(case, self.of_host, (system.name(), &words));
                self.remove_disk(case)?;
                row?
            }
            (System::WithDisk { .. }, _, Load::Arena { .. }) => {
                let text = format!("{} has no disk: try --guest debian", case.guest.name);
                return Err(LabError::Which(text));
            }
            (System::Longhaul | System::WithDisk { .. } | System::Strategy(_), None, _) => {
                return Err(LabError::Which("no agents were started".to_owned()));
            }
        };
        document.add_row(&row, &show(&row));
        Ok(row)
    }

    /// Moves a case's guest with its disk by Longhaul, there and back; `back` is the system's name
    /// of the way back.
    fn there_and_back(
        &self,
        case: &Case,
        (work_for, back): (Duration, &str),
        document: &mut Document,
    ) -> Result<Vec<MoveRow>, LabError> {
        let none = || LabError::Which("no agents were started".to_owned());
        let longhaul = self.longhaul.as_ref().ok_or_else(none)?;
        let how = (&["--disks", "precopy"][..], work_for, back);
        let rows = longhaul.run_there_and_back(case, self.of_host, how);
        self.remove_disk(case)?;
        let rows = rows?;
        for row in &rows {
            document.add_row(row, &show(row));
        }
        Ok(rows)
    }

    /// Removes the disk of a guest.
    fn remove_disk(&self, case: &Case) -> Result<(), LabError> {
        for disk in &case.guest.disks {
            for host in self.launcher.lab.hosts() {
                for name in [
                    format!("{}.img", disk.image),
                    format!("{}.img.moved", disk.image),
                ] {
                    let path = host.folder().join(name);
                    match fs::remove_file(&path) {
                        Err(error) if error.kind() != ErrorKind::NotFound => {
                            return Err(error).during(|| format!("remove {}", path.display()));
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }
}

/// The system that moves the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Longhaul,
    /// Longhaul with the disk; whether pages may refer to the disk's blocks.
    WithDisk {
        index: bool,
    },
    /// Longhaul with this strategy for the memory.
    Strategy(&'static str),
    Peer(PeerSystem),
}

impl System {
    const WITH_DISK: [Self; 2] = [
        Self::WithDisk { index: true },
        Self::WithDisk { index: false },
    ];

    /// Returns its name in rows.
    fn name(self) -> &'static str {
        match self {
            Self::Longhaul | Self::Strategy(_) => "longhaul",
            Self::WithDisk { index: true } => "longhaul-with-disk",
            Self::WithDisk { index: false } => "longhaul-with-disk-no-index",
            Self::Peer(peer) => peer.name(),
        }
    }

    fn takes_disk(self) -> bool {
        matches!(self, Self::WithDisk { .. })
    }

    /// Returns whether a QEMU of this version lacks it.
    fn is_lacking(self, version: &str) -> bool {
        matches!(self, Self::Peer(peer) if !peer.is_in(version))
    }
}

/// Returns the systems selected by name, or else the usual ones of this kind of guest that QEMU
/// supports.
fn systems(options: &Options, has_system: bool, qemu: &str) -> Result<Vec<System>, LabError> {
    let peers: &[PeerSystem] = match (has_system, options.quick) {
        (false, _) => &[PeerSystem::Default, PeerSystem::MultifdZstdPostcopy],
        (true, true) => &[
            PeerSystem::Default,
            PeerSystem::MultifdZstd,
            PeerSystem::MultifdZstdPostcopy,
        ],
        (true, false) => &[
            PeerSystem::MultifdZstd,
            PeerSystem::Default,
            PeerSystem::Xbzrle,
            PeerSystem::MultifdZstdPostcopy,
        ],
    };
    if options.system.is_empty() {
        let (peers, lacking): (Vec<_>, Vec<_>) = peers.iter().partition(|peer| peer.is_in(qemu));
        for peer in lacking {
            say(&format!("not measured: {}", lacks(qemu, peer)));
        }
        let peers = peers.into_iter().map(System::Peer);
        let with_disk = System::WITH_DISK.into_iter().filter(|_| has_system);
        let ours = [System::Longhaul].into_iter().chain(with_disk);
        return Ok(ours.chain(peers).collect());
    }
    let all = || {
        let peers = PeerSystem::ALL.into_iter().map(System::Peer);
        let ours = [System::Longhaul].into_iter().chain(System::WITH_DISK);
        ours.chain(peers)
    };
    let named = |name: &String| match all().find(|system| system.name() == name) {
        Some(System::Peer(peer)) if !peer.is_in(qemu) => Err(LabError::Which(lacks(qemu, peer))),
        Some(system) => Ok(system),
        None => {
            let names: Vec<&str> = all().map(System::name).collect();
            let names = names.join(", ");
            Err(LabError::Which(format!(
                "this bench has no system `{name}`: it has {names}"
            )))
        }
    };
    options.system.iter().map(named).collect()
}

fn lacks(qemu: &str, peer: PeerSystem) -> String {
    let (name, since) = (peer.name(), peer.since().unwrap_or_default());
    format!("{name}, which QEMU has since {since}: this one is {qemu} (try --qemu 11.1)")
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
    let of_before = |work: Option<f64>| {
        let work = work.zip(row.work_before_per_s);
        let work = work.filter(|(_, before)| *before > 0.0);
        work.map(|(work, before)| work / before * 100.0)
    };
    let after = of_before(row.work_after_switchover_per_s).map_or_else(String::new, |share| {
        format!(
            ", {share:.1} % after the switchover of {}",
            number(row.switchover_ms, "ms")
        )
    });
    let clients = row.responses.as_ref().map_or_else(String::new, |seen| {
        format!(
            "clients' responses {} before and {} during, none for {}, ",
            number(seen.before_ms, "ms"),
            number(seen.during_ms, "ms"),
            number(seen.longest_gap_ms, "ms")
        )
    });
    format!(
        "{:<18} {}, repeat {}: {} over the link, {}, downtime {}, work {} of before{after}, \
         {clients}errors {}, {}",
        match row.system.as_str() {
            "longhaul" => format!("longhaul {}", row.strategy),
            other => other.to_owned(),
        },
        kind,
        row.repeat,
        number(row.link_bytes.map(|bytes| bytes as f64 / 1e6), "MB"),
        number(row.total_ms.map(|ms| ms / 1e3), "s"),
        number(row.downtime_ms, "ms"),
        number(of_before(row.work_during_per_s), "%"),
        row.verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
        row.outcome,
    )
}

/// Returns whether a row counts: the move completed, and its guest found no errors.
fn counts<P>(row: &MoveRow<P>) -> bool {
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

/// Checks all of Longhaul's own rows: nothing damaged, nothing failed.
fn judge_own(rows: &[MoveRow], document: &mut Document) {
    let own = || rows.iter().filter(|row| row.system.starts_with("longhaul"));
    // A row whose guest did not answer is as bad as one with an error.
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn chosen(words: &[&str], has_system: bool, qemu: &str) -> Result<Vec<&'static str>, LabError> {
        let options = Line::parse_from([&["bench"], words].concat()).options;
        let systems = systems(&options, has_system, qemu)?;
        Ok(systems.into_iter().map(System::name).collect())
    }

    #[test]
    fn a_peer_that_the_qemu_lacks_is_left_out_or_refused_when_named() {
        let name = "qemu-multifd-zstd-postcopy";
        for (words, has_system) in [(&[][..], false), (&[], true), (&["--quick"], true)] {
            let old = chosen(words, has_system, "10.0.2").unwrap();
            assert!(old.contains(&"qemu-default"), "{old:?}");
            let new = chosen(words, has_system, "11.1.3").unwrap();
            assert_eq!(new, [&old[..], &[name]].concat());
        }
        let error = chosen(&["--system", name], false, "7.2.22").unwrap_err();
        assert!(error.to_string().contains("since 10.1"), "{error}");
        assert_eq!(chosen(&["--system", name], true, "10.1.0").unwrap(), [name]);
        let error = chosen(&["--system", "rsync"], true, "11.1.3").unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}
