//! Implements `lab bench strategies`: Appmembench of paper 003 (section 4.4), moved by each of
//! Longhaul's strategies for memory and by QEMU's own pre-copy and post-copy.

mod judge;

use super::super::document::Document;
use super::super::{Bench, Options};
use super::{ASKED_DOWNTIME_MS, Asked, LINK, Movers, NEWER_QEMU, System, lacks, on_ground};
use crate::moves::{Case, Load};
use crate::peer::PeerSystem;
use longhaul_lab::arena::Workload;
use longhaul_lab::error::LabError;
use longhaul_lab::guest::Tiny;
use longhaul_lab::installed;
use longhaul_lab::lab::say;
use longhaul_lab::link::spec::LinkSpec;
use std::time::Duration;

/// The bench's entry of `lab bench --list`.
pub(in crate::bench) const BENCH: Bench = Bench {
    name: "strategies",
    about: "a guest that writes memory at a fixed rate or as fast as it can, moved by each of \
            Longhaul's strategies and by QEMU's pre-copy and post-copy",
    minutes: (51, 6),
    run,
};

/// Longhaul's strategies.
const STRATEGIES: &[&str] = &["precopy", "hybrid", "postcopy", AUTO];
/// The strategy that leaves the choice to the agent.
const AUTO: &str = "auto";
/// `hybrid` with `--early-release`, measured for the checks.
const EARLY: &str = "hybrid-early";

/// Returns the options of a move by a strategy of this bench.
pub(super) fn words(strategy: &str) -> Vec<&str> {
    match strategy {
        EARLY => vec!["--strategy", "hybrid", "--early-release"],
        other => vec!["--strategy", other],
    }
}

/// QEMU's own ways, in the order of the rows.
const PEERS: [PeerSystem; 4] = [
    PeerSystem::Default,
    PeerSystem::Postcopy,
    PeerSystem::PostcopyAtOnce,
    PeerSystem::MultifdZstdPostcopy,
];
/// Those of the checks, which further links need.
const PEERS_OF_CHECKS: [PeerSystem; 2] = [PeerSystem::Postcopy, PeerSystem::PostcopyAtOnce];
const QUICK_PEER: PeerSystem = PeerSystem::Postcopy;
/// The first link is that of `lab bench memory`.
const FAR_LINK: &str = "100mbit,100ms";

const GUEST_MEMORY_MIB: u64 = 256;
/// Half of the memory, as in the paper.
const ARENA_BYTES: u64 = GUEST_MEMORY_MIB << 19;
/// The paper's rule: a move that has not switched over by itself by then is forced to.
const FORCE_AFTER: Duration = Duration::from_secs(60);
/// How long the guest is observed after the switchover.
const OBSERVE: Duration = Duration::from_secs(10);
/// The time limit of a move.
const LIMIT: Duration = Duration::from_secs(120);

/// How the guest writes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// Megabytes of pages per second; `None`: as fast as the machine allows.
    rate_mb_per_s: Option<u64>,
    /// The working set is the guest's memory divided by this.
    working_set_of: u64,
}

/// The rates with one working set, then the working sets with one rate.
const KINDS: [Kind; 5] = [
    Kind::new(Some(10), 4),
    Kind::new(Some(100), 4),
    Kind::new(None, 4),
    Kind::new(None, 8),
    Kind::new(None, 2),
];
/// Those of further links and of short runs.
const FEW_KINDS: [Kind; 2] = [Kind::new(Some(10), 4), Kind::new(None, 4)];

impl Kind {
    const fn new(rate_mb_per_s: Option<u64>, working_set_of: u64) -> Self {
        Self {
            rate_mb_per_s,
            working_set_of,
        }
    }

    /// Returns its name in rows.
    fn name(self) -> String {
        let part = self.working_set_of;
        match self.rate_mb_per_s {
            Some(rate) => format!("{rate}mb_1_{part}"),
            None => format!("max_1_{part}"),
        }
    }

    fn arena(self, seed: u64) -> Workload {
        let pages_per_s = |rate: u64| rate * 1_000_000 / 4096;
        Workload {
            content: "mix".to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: (GUEST_MEMORY_MIB << 20) / self.working_set_of,
            pages_per_s: self
                .rate_mb_per_s
                .map_or(Workload::AS_FAST_AS_IT_CAN, pages_per_s),
            write_bytes: 512,
            writers: 1,
            // Appmembench only writes. Each write verifies its page first.
            verify_pages_per_s: 0,
            seed,
        }
    }

    /// Returns whether sending whole pages cannot catch up with its writes.
    fn outpaces(self, link: LinkSpec) -> bool {
        let bits_per_s = self.rate_mb_per_s.map(|rate| rate * 8_000_000);
        bits_per_s.is_none_or(|rate| rate >= link.rate_bps)
    }
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    if options.guest != "tiny" {
        let text = format!("this bench moves the guest tiny, not `{}`", options.guest);
        return Err(LabError::Which(text));
    }
    let version = installed::qemu_version(&installed::qemu(&options.qemu)?)?;
    let has_newer = installed::qemu(NEWER_QEMU).is_ok();
    let systems = systems(options, &version, has_newer)?;
    let more = toml::Table::new();
    on_ground(
        options,
        LINK,
        None,
        &systems,
        more,
        document,
        |asked, movers, document| measure(asked, &systems, movers, document),
    )
}

/// Lets the systems move the guest over each link, and computes the checks.
fn measure(
    asked: &Asked<'_>,
    systems: &[System],
    movers: &Movers<'_>,
    document: &mut Document,
) -> Result<(), LabError> {
    let lab = movers.launcher.lab;
    let mut rows = Vec::new();
    for link in links(asked)? {
        let is_first = link == asked.link;
        if !is_first {
            lab.link(0, 1)?.change(link)?;
            document.add_link(link, lab.measure_link(link)?);
        }
        for repeat in 1..=asked.options.repeats_or(1) {
            for kind in kinds(asked.options, is_first) {
                for system in systems {
                    if !is_measured(*system, kind, (link, is_first), (asked.options, repeat)) {
                        continue;
                    }
                    let name = format!("bench-{}", rows.len() + 1);
                    let case = case(asked, kind, link, (&name, repeat));
                    rows.push(movers.add_row(&case, *system, document)?);
                }
            }
        }
    }
    judge::judge(&rows, document);
    Ok(())
}

/// Returns the links, the first of which is there already.
fn links(asked: &Asked<'_>) -> Result<Vec<LinkSpec>, LabError> {
    let mut links = vec![asked.link];
    if asked.options.link.is_none() && !asked.options.quick {
        links.push(asked.options.link_or(FAR_LINK)?);
    }
    Ok(links)
}

/// Returns the selected ways to write, or else the usual ones of the link.
fn kinds(options: &Options, is_first: bool) -> Vec<Kind> {
    let usual: &[Kind] = match options.quick || !is_first {
        true => &FEW_KINDS,
        false => &KINDS,
    };
    match options.workload.is_empty() {
        true => usual.to_vec(),
        false => {
            let wanted = |kind: &Kind| options.wants_workload(&kind.name());
            KINDS.into_iter().filter(wanted).collect()
        }
    }
}

/// Returns whether a system moves such a guest over a link. Pre-copy without a chance is measured
/// once; further links are measured for the checks.
fn is_measured(
    system: System,
    kind: Kind,
    (link, is_first): (LinkSpec, bool),
    (options, repeat): (&Options, u32),
) -> bool {
    let peer = match system {
        System::Peer(peer) => peer,
        System::Strategy(EARLY) => return FEW_KINDS.contains(&kind) || !options.system.is_empty(),
        _ => return true,
    };
    let is_hopeless = peer.strategy() == "precopy" && kind.outpaces(link);
    let is_asked = is_first || !options.system.is_empty() || PEERS_OF_CHECKS.contains(&peer);
    is_asked && (repeat == 1 || !is_hopeless)
}

/// Returns a guest of this name; one that was moved away cannot be started again under its name.
fn case(asked: &Asked<'_>, kind: Kind, link: LinkSpec, (name, repeat): (&str, u32)) -> Case {
    let mut guest = Tiny::new(name);
    guest.memory_mib = GUEST_MEMORY_MIB;
    let mut guest = guest.description();
    guest.machine.clone_from(&asked.machine);
    Case {
        guest,
        load: Load::Arena {
            arena: kind.arena(asked.options.seed.wrapping_add(u64::from(repeat))),
            name: kind.name(),
            dirty_share: None,
        },
        link,
        downtime_ms: ASKED_DOWNTIME_MS,
        limit: LIMIT,
        force_after: Some(FORCE_AFTER),
        observe: OBSERVE,
        repeat,
    }
}

/// Returns the systems selected by name, or else the usual ones. A baseline that the chosen QEMU
/// lacks runs with the newer one, if that is installed.
fn systems(options: &Options, qemu: &str, has_newer: bool) -> Result<Vec<System>, LabError> {
    let early = (!options.quick || !options.system.is_empty()).then_some(&EARLY);
    let strategies = STRATEGIES.iter().chain(early).copied();
    let strategies = strategies.map(System::Strategy);
    let runs = |peer: PeerSystem| peer.is_in(qemu) || has_newer;
    if options.system.is_empty() {
        let peers: &[PeerSystem] = match options.quick {
            true => &[QUICK_PEER],
            false => &PEERS,
        };
        for lacking in peers.iter().filter(|peer| !runs(**peer)) {
            say(&format!("not measured: {}", lacks(qemu, *lacking)));
        }
        let peers = peers.iter().copied().filter(|peer| runs(*peer));
        return Ok(strategies.chain(peers.map(System::Peer)).collect());
    }
    let all: Vec<System> = strategies
        .chain(PeerSystem::ALL.map(System::Peer))
        .collect();
    let mut chosen = Vec::new();
    for name in &options.system {
        let before = chosen.len();
        chosen.extend(all.iter().filter(|system| is_named(**system, name)));
        match chosen.get(before) {
            Some(System::Peer(peer)) if !runs(*peer) => {
                return Err(LabError::Which(lacks(qemu, *peer)));
            }
            Some(_) => {}
            None => {
                let peers = PeerSystem::ALL.map(PeerSystem::name);
                let names = [&["longhaul"], STRATEGIES, &[EARLY], &peers]
                    .concat()
                    .join(", ");
                return Err(LabError::Which(format!(
                    "this bench has no system `{name}`: it has {names}"
                )));
            }
        }
    }
    Ok(chosen)
}

/// Returns whether a name on the command line means a system.
fn is_named(system: System, name: &str) -> bool {
    system.name() == name || matches!(system, System::Strategy(strategy) if strategy == name)
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

    fn options(words: &[&str]) -> Options {
        Line::parse_from([&["bench"], words].concat()).options
    }

    fn chosen(words: &[&str], qemu: &str, has_newer: bool) -> Result<Vec<String>, LabError> {
        let name = |system: System| match system {
            System::Strategy(strategy) => strategy.to_owned(),
            other => other.name().to_owned(),
        };
        let systems = systems(&options(words), qemu, has_newer)?;
        Ok(systems.into_iter().map(name).collect())
    }

    #[test]
    fn systems_are_strategies_and_baselines() {
        let newest = "qemu-multifd-zstd-postcopy";
        let ours = ["precopy", "hybrid", "postcopy", "auto", EARLY];
        let theirs = ["qemu-default", "qemu-postcopy", "qemu-postcopy-at-once"];
        let old = [&ours[..], &theirs].concat();
        assert_eq!(chosen(&[], "10.0.2", false).unwrap(), old);
        let all = [&old[..], &[newest]].concat();
        assert_eq!(chosen(&[], "10.0.2", true).unwrap(), all);
        assert_eq!(chosen(&[], "11.1.3", false).unwrap(), all);
        let quick = [&ours[..4], &["qemu-postcopy"]].concat();
        assert_eq!(chosen(&["--quick"], "10.0.2", true).unwrap(), quick);
        let some = ["--system", "hybrid,qemu-xbzrle"];
        assert_eq!(
            chosen(&some, "10.0.2", false).unwrap(),
            ["hybrid", "qemu-xbzrle"]
        );
        assert_eq!(
            chosen(&["--system", "longhaul"], "7.2.22", false).unwrap(),
            ours
        );
        let error = chosen(&["--system", newest], "10.0.2", false).unwrap_err();
        assert!(error.to_string().contains("since 10.1"), "{error}");
        let error = chosen(&["--system", "rsync"], "10.0.2", false).unwrap_err();
        assert!(
            error.to_string().contains("auto, hybrid-early, "),
            "{error}"
        );
    }

    #[test]
    fn pre_copy_without_a_chance_is_measured_once() {
        let link: LinkSpec = LINK.parse().unwrap();
        let [slow, .., fast] = KINDS;
        let none = options(&[]);
        let measured = |peer, kind, is_first, repeat| {
            is_measured(System::Peer(peer), kind, (link, is_first), (&none, repeat))
        };
        assert!(!slow.outpaces(link) && fast.outpaces(link));
        for (peer, kind, is_first, repeat, expected) in [
            (PeerSystem::Default, slow, true, 2, true),
            (PeerSystem::Default, fast, true, 1, true),
            (PeerSystem::Default, fast, true, 2, false),
            (PeerSystem::Default, slow, false, 1, false),
            (PeerSystem::Postcopy, fast, false, 2, true),
            (PeerSystem::PostcopyAtOnce, fast, false, 1, true),
        ] {
            let found = measured(peer, kind, is_first, repeat);
            assert_eq!(found, expected, "{peer:?} {kind:?} {is_first} {repeat}");
        }
        let asked = options(&["--system", "qemu-default"]);
        let default = System::Peer(PeerSystem::Default);
        assert!(is_measured(default, slow, (link, false), (&asked, 1)));
        let ours = System::Strategy("precopy");
        assert!(is_measured(ours, fast, (link, false), (&none, 3)));
        let early = System::Strategy(EARLY);
        assert!(is_measured(early, slow, (link, true), (&none, 3)));
        assert!(!is_measured(early, fast, (link, true), (&none, 1)));
    }

    #[test]
    fn a_kind_is_named_by_rate_and_working_set() {
        let names = |kinds: Vec<Kind>| kinds.into_iter().map(Kind::name).collect::<Vec<_>>();
        let of = |words: &[&str], is_first| names(kinds(&options(words), is_first));
        assert_eq!(
            of(&[], true),
            ["10mb_1_4", "100mb_1_4", "max_1_4", "max_1_8", "max_1_2"]
        );
        assert_eq!(of(&["--quick"], true), ["10mb_1_4", "max_1_4"]);
        assert_eq!(of(&[], false), ["10mb_1_4", "max_1_4"]);
        let one = of(&["--quick", "--workload", "max_1_2"], false);
        assert_eq!(one, ["max_1_2"]);
        let [slow, .., fast] = KINDS.map(|kind| kind.arena(1));
        assert_eq!((slow.pages_per_s, slow.working_set_bytes), (2441, 64 << 20));
        assert_eq!(fast.pages_per_s, Workload::AS_FAST_AS_IT_CAN);
        assert_eq!(fast.working_set_bytes, fast.arena_bytes);
    }
}
