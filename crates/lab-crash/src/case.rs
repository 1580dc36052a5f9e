//! Defines the cases of the matrix: the victim, the point of failure, the QEMUs; enumerates and
//! names them.

use super::point::{Point, Side, Step};
use longhaul_lab::guest::disks::Format;
use std::fmt;

/// The part that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Victim {
    /// The source's agent is killed.
    SourceAgent,
    /// The destination's agent is killed.
    DestinationAgent,
    /// Both agents are killed, as by a power cut of both sites.
    BothAgents,
    /// The guest's QEMU at the source is killed.
    SourceQemu,
    /// The guest's QEMU at the destination is killed.
    DestinationQemu,
    /// The server of the source's disk export is killed.
    SourceFront,
    /// The same at the destination, while blocks of the disk may be missing there.
    DestinationFront,
    /// The supervisor of the source's disk export is killed.
    SourceSupervisor,
    /// The same at the destination.
    DestinationSupervisor,
    /// The page server of the destination's QEMU is killed, while memory follows.
    PageServer,
    /// The connection between the agents is closed.
    Connection,
    /// The link is cut for a while.
    Link,
    /// The write of a record fails, or is reported as failed.
    Record,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::BothAgents,
        Self::SourceQemu,
        Self::DestinationQemu,
        Self::SourceFront,
        Self::DestinationFront,
        Self::SourceSupervisor,
        Self::DestinationSupervisor,
        Self::PageServer,
        Self::Connection,
        Self::Link,
        Self::Record,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::SourceAgent => "source-agent",
            Self::DestinationAgent => "destination-agent",
            Self::BothAgents => "both-agents",
            Self::SourceQemu => "source-qemu",
            Self::DestinationQemu => "destination-qemu",
            Self::SourceFront => "source-front",
            Self::DestinationFront => "destination-front",
            Self::SourceSupervisor => "source-supervisor",
            Self::DestinationSupervisor => "destination-supervisor",
            Self::PageServer => "page-server",
            Self::Connection => "connection",
            Self::Link => "link",
            Self::Record => "record",
        }
    }

    /// Returns the sides whose agents are killed.
    pub fn agents(self) -> &'static [Side] {
        match self {
            Self::SourceAgent => &[Side::Source],
            Self::DestinationAgent => &[Side::Destination],
            Self::BothAgents => &[Side::Source, Side::Destination],
            _ => &[],
        }
    }

    /// Returns the side whose QEMU is killed.
    pub fn qemu(self) -> Option<Side> {
        match self {
            Self::SourceQemu => Some(Side::Source),
            Self::DestinationQemu => Some(Side::Destination),
            _ => None,
        }
    }

    /// Returns the side whose disk export is killed, and the process, by its part.
    pub fn front(self) -> Option<(Side, &'static str)> {
        match self {
            Self::SourceFront => Some((Side::Source, "tell")),
            Self::DestinationFront => Some((Side::Destination, "arrive")),
            Self::SourceSupervisor => Some((Side::Source, "supervise")),
            Self::DestinationSupervisor => Some((Side::Destination, "supervise")),
            _ => None,
        }
    }
}

/// The QEMUs of both hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pair {
    /// 7.2 on both.
    Old,
    /// 10.0 on both.
    New,
    /// From 7.2 to 10.0.
    OldToNew,
    /// 11.1 on both.
    Newest,
}

impl Pair {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Old, Self::New, Self::OldToNew, Self::Newest];
    /// The pairs of the matrix; the others run where they are named.
    pub const OF_MATRIX: [Self; 3] = [Self::Old, Self::New, Self::OldToNew];

    /// Returns the versions, by host.
    pub fn versions(self) -> [&'static str; 2] {
        match self {
            Self::Old => ["7.2", "7.2"],
            Self::New => ["10.0", "10.0"],
            Self::OldToNew => ["7.2", "10.0"],
            Self::Newest => ["11.1", "11.1"],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Old => "7.2",
            Self::New => "10.0",
            Self::OldToNew => "7.2-10.0",
            Self::Newest => "11.1",
        }
    }
}

/// When the source releases the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Release {
    /// When the destination has everything.
    Late,
    /// When the guest is stopped.
    Early,
}

/// How long the failed part stays away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Back {
    /// It is back at once; a link after a second.
    AtOnce,
    /// It is back after the other side has noticed, and given up or fallen into doubt.
    Later,
}

/// The place of the guest's disk, and its strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disks {
    /// Both hosts share it.
    Shared,
    /// Each host has its own; everything is at the destination when the guest stops.
    Precopy,
    /// Each host has its own; the guest's writes wait for both.
    Mirror,
    /// Each host has its own; frequently written blocks arrive after the guest runs at the
    /// destination.
    Hybrid,
    /// Each host has its own; all blocks arrive after that.
    Postcopy,
}

impl Disks {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Shared,
        Self::Precopy,
        Self::Mirror,
        Self::Hybrid,
        Self::Postcopy,
    ];

    /// Returns whether blocks may be missing when the guest runs at the destination.
    pub fn leaves(self) -> bool {
        matches!(self, Self::Hybrid | Self::Postcopy)
    }

    /// Returns its name in requests of moves.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Precopy => "precopy",
            Self::Mirror => "mirror",
            Self::Hybrid => "hybrid",
            Self::Postcopy => "postcopy",
        }
    }
}

/// The strategy of the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Memory {
    /// Everything is at the destination when the guest runs there.
    Precopy,
    /// Frequently written blocks follow.
    Hybrid,
    /// What was not sent before follows.
    Postcopy,
}

impl Memory {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Precopy, Self::Hybrid, Self::Postcopy];

    /// Returns whether blocks are missing when the guest runs at the destination.
    pub fn follows(self) -> bool {
        self != Self::Precopy
    }

    /// Returns its name in requests of moves.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Hybrid => "hybrid",
            Self::Postcopy => "postcopy",
        }
    }
}

/// The properties of the hosts of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Their QEMUs.
    pub pair: Pair,
    /// Whether these lock the guest's disk.
    pub locks: bool,
    /// The format of the guest's image where each host has its own; `None` where both share one.
    pub own: Option<Format>,
}

impl Site {
    /// Returns all of them.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for pair in Pair::ALL {
            for locks in [false, true] {
                let own = [None, Some(Format::Raw), Some(Format::Qcow2)];
                all.extend(own.map(|own| Self { pair, locks, own }));
            }
        }
        all
    }
}

/// The properties of a case beside its point, which are covered in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind {
    /// The part that fails.
    pub victim: Victim,
    /// The step of the move.
    pub step: Step,
    /// When the source releases the guest.
    pub release: Release,
    /// The QEMUs.
    pub pair: Pair,
    /// Whether QEMU locks the guest's disk; a lock could hide a second copy.
    pub locks: bool,
    /// How long the failed part stays away.
    pub back: Back,
    /// The guest's disk.
    pub disks: Disks,
    /// The format of its image.
    pub format: Format,
    /// The guest's memory.
    pub memory: Memory,
}

impl Kind {
    /// Returns whether something is missing when the guest runs at the destination.
    pub fn leaves(&self) -> bool {
        self.disks.leaves() || self.memory.follows()
    }

    /// Returns the site that it needs.
    pub fn site(&self) -> Site {
        Site {
            pair: self.pair,
            locks: self.locks,
            own: (self.disks != Disks::Shared).then_some(self.format),
        }
    }
}

/// One case.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Case {
    /// Its properties beside its point.
    pub kind: Kind,
    /// The point of failure.
    pub point: Point,
}

impl fmt::Display for Case {
    /// Formats the name by which `--only` runs it alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind {
            victim,
            pair,
            locks,
            back,
            release,
            disks,
            format,
            memory,
            ..
        } = self.kind;
        write!(
            f,
            "{}:{}:{}:{}:{}:{}:{}:{}:{}",
            victim.name(),
            self.point.name,
            pair.name(),
            match release {
                Release::Late => "late",
                Release::Early => "early",
            },
            if locks { "locks-on" } else { "locks-off" },
            match back {
                Back::AtOnce => "at-once",
                Back::Later => "later",
            },
            format.name(),
            disks.name(),
            memory.name()
        )
    }
}

impl Case {
    /// Returns whether both copies are compared: where the point requires it, and where the
    /// handover begins after the comparison, with one pair of QEMUs. An agent that returns there
    /// must not request it again.
    pub fn compares(&self) -> bool {
        let Kind {
            step,
            pair,
            release,
            ..
        } = self.kind;
        let after = matches!(
            step,
            Step::Ready | Step::Released | Step::Committed | Step::Recovering
        );
        let chosen = pair == Pair::OldToNew && release == Release::Late;
        self.point.needs_verify() || (after && chosen)
    }

    /// Returns whether memory that follows makes a difference: from the switchover on. Local disks
    /// follow it then. Its content is not compared.
    fn is_of_memory_that_follows(&self) -> bool {
        let Kind {
            step,
            disks,
            memory,
            ..
        } = self.kind;
        let moves = match disks {
            Disks::Shared => true,
            Disks::Hybrid => memory == Memory::Hybrid,
            Disks::Postcopy => memory == Memory::Postcopy,
            Disks::Precopy | Disks::Mirror => false,
        };
        let stopped = matches!(
            step,
            Step::Stopped
                | Step::Ready
                | Step::Released
                | Step::Committed
                | Step::Pulling
                | Step::Done
                | Step::Recovering
                | Step::Returning
        );
        moves && stopped && !self.point.needs_verify()
    }

    /// Returns whether the case exists: whether its victim exists, and its failure makes a
    /// difference.
    fn is_sound(&self) -> bool {
        let Kind {
            victim,
            step,
            release,
            locks,
            back,
            disks,
            format,
            memory,
            ..
        } = self.kind;
        let fits = match victim {
            Victim::SourceAgent | Victim::DestinationAgent | Victim::BothAgents => true,
            // Disk exports exist from the offer on, and at the destination only where blocks are
            // missing.
            Victim::SourceFront | Victim::SourceSupervisor => {
                disks != Disks::Shared && has_fronts(step)
            }
            Victim::DestinationFront | Victim::DestinationSupervisor => {
                disks.leaves() && has_fronts(step)
            }
            // Without it, missing memory is lost, and so is the guest; an operator must end it.
            Victim::SourceQemu if memory.follows() && disks != Disks::Shared => false,
            Victim::SourceQemu => !matches!(step, Step::Asking | Step::Done),
            // Once the destination was told to run the guest, QEMU's main loop may wait for a page
            // when the page server ends. Such a guest hangs.
            Victim::PageServer => {
                memory.follows() && matches!(step, Step::Stopped | Step::Ready | Step::Released)
            }
            Victim::DestinationQemu => !matches!(
                step,
                Step::Asking | Step::Offering | Step::Cancelling | Step::Refusing | Step::Returning
            ),
            Victim::Connection => self.point.is_message(),
            Victim::Link => step != Step::Asking,
            Victim::Record => self.point.is_record(),
        };
        // A longer absence is noticed where another part waits for the victim.
        let waits = match victim {
            Victim::SourceAgent | Victim::DestinationAgent | Victim::BothAgents => true,
            Victim::Link => matches!(
                step,
                Step::Ready | Step::Released | Step::Committed | Step::Pulling
            ),
            _ => false,
        };
        // QEMU refuses because of a lock held by another process; where blocks are missing, the
        // disk export has the lock from the beginning. QEMU 7.2 has it when it has loaded a guest
        // without its memory.
        let has_lock = memory.follows() && self.kind.pair == Pair::Old;
        let refuses = step != Step::Returning || (locks && !disks.leaves() && !has_lock);
        // Everything before the stop is the same; READY is left out.
        let passes = match release {
            Release::Late => true,
            Release::Early => {
                matches!(
                    step,
                    Step::Stopped
                        | Step::Ready
                        | Step::Released
                        | Step::Committed
                        | Step::Pulling
                        | Step::Done
                ) && !self.point.name.ends_with(":ready")
            }
        };
        let told = match disks {
            Disks::Shared => {
                let lists = !self.point.needs_lists() || memory.follows();
                lists && !self.point.needs_local_disks()
            }
            _ => !self.point.needs_shared_disks(),
        };
        let told = told && (!self.point.needs_what_follows() || self.kind.leaves());
        // With hybrid few blocks of a disk are missing: the guest may not access them, and in an
        // image that grows their place is unknown.
        let left = match (step, disks) {
            (Step::Pulling, _) if memory.follows() => {
                disks == Disks::Postcopy || !self.point.needs_writes()
            }
            (Step::Pulling, Disks::Hybrid) => {
                format == Format::Raw && !self.point.needs_the_guest()
            }
            (Step::Pulling, _) => disks.leaves(),
            _ => true,
        };
        // A shared disk is not touched, whatever its format.
        let made = disks != Disks::Shared || format == Format::Raw;
        let follows = match memory {
            Memory::Precopy => !self.point.needs_memory(),
            _ => self.is_of_memory_that_follows(),
        };
        let met = passes && told && left && made && follows && step != Step::Elsewhere;
        met && fits && refuses && (waits || back == Back::AtOnce)
    }
}

/// Returns every case of the matrix.
pub fn universe(points: &[Point]) -> Vec<Case> {
    universe_of(points, &Pair::OF_MATRIX)
}

/// Returns every case with these QEMUs.
pub fn universe_of(points: &[Point], pairs: &[Pair]) -> Vec<Case> {
    let mut cases = Vec::new();
    for victim in Victim::ALL {
        for point in points {
            for &pair in pairs {
                cases.extend(variants(victim, point, pair));
            }
        }
    }
    cases.retain(Case::is_sound);
    cases
}

/// Returns whether a move of local disks has disk exports during the whole step.
fn has_fronts(step: Step) -> bool {
    matches!(
        step,
        Step::Sending
            | Step::Stopped
            | Step::Ready
            | Step::Released
            | Step::Committed
            | Step::Pulling
    )
}

/// Returns the step of a point when disks and memory move in this way: missing blocks arrive over a
/// connection that is made again.
fn step_of(point: &Point, disks: Disks, memory: Memory) -> Step {
    match point.step {
        Step::Resuming if disks.leaves() || memory.follows() => Step::Pulling,
        step => step,
    }
}

fn of_every_format(disks: Disks) -> impl Iterator<Item = (Disks, Format, Memory)> {
    let formats = [Format::Raw, Format::Qcow2].into_iter();
    formats.flat_map(move |format| Memory::ALL.map(|memory| (disks, format, memory)))
}

/// Returns all variants of a victim at a point with a pair of QEMUs.
fn variants(victim: Victim, point: &Point, pair: Pair) -> Vec<Case> {
    let mut cases = Vec::new();
    for locks in [false, true] {
        for back in [Back::AtOnce, Back::Later] {
            for release in [Release::Late, Release::Early] {
                for (disks, format, memory) in Disks::ALL.into_iter().flat_map(of_every_format) {
                    let kind = Kind {
                        victim,
                        step: step_of(point, disks, memory),
                        release,
                        pair,
                        locks,
                        back,
                        disks,
                        format,
                        memory,
                    };
                    let point = point.clone();
                    cases.push(Case { kind, point });
                }
            }
        }
    }
    cases
}

/// Returns every victim at every point: with every pair of QEMUs and a late release, and with a
/// rotating pair and an early one; both with memory that follows and without, which has a rotating
/// pair too. Locks, the time away, disks and their image formats alternate.
pub fn all(mut universe: Vec<Case>) -> Vec<Case> {
    // Stable: the order of the steps is kept.
    universe.sort_by_key(|case| {
        let kind = case.kind;
        (kind.release, kind.victim, kind.memory.follows())
    });
    let alike = |one: &Case, next: &Case| key(one) == key(next);
    let mut chosen = Vec::new();
    for (number, same) in universe.chunk_by(alike).enumerate() {
        chosen.extend(same.get(number % same.len()).cloned());
    }
    chosen
}

/// Returns the key by which cases of `all` differ.
fn key(case: &Case) -> (Release, Victim, String, bool, Option<Pair>) {
    let (kind, name) = (case.kind, case.point.name.clone());
    let follows = kind.memory.follows();
    let pair = (kind.release == Release::Late && !follows).then_some(kind.pair);
    (kind.release, kind.victim, name, follows, pair)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn points() -> Vec<Point> {
        let names = [
            "source:before-send:offer",
            "destination:before-record:ready",
            "source:after-record:released",
        ];
        names.map(|name| Point::named(name).unwrap()).to_vec()
    }

    #[test]
    fn every_victim_meets_every_point_with_every_pair() {
        let universe = universe(&points());
        let all = all(universe.clone());
        let keys = |cases: &[Case]| -> HashSet<_> { cases.iter().map(key).collect() };
        assert_eq!(keys(&all), keys(&universe));
        assert_eq!(keys(&all).len(), all.len());
        let off = all.iter().filter(|case| !case.kind.locks).count();
        assert!(off * 3 >= all.len(), "{off} of {}", all.len());
        let grows = |case: &&Case| case.kind.format == Format::Qcow2;
        let grow = all.iter().filter(grows).count();
        assert!(grow * 3 >= all.len(), "{grow} of {}", all.len());
    }

    #[test]
    fn the_hand_over_is_tried_with_and_without_a_comparison_before_it() {
        let all = all(universe(&points()));
        for point in [
            "destination:before-record:ready",
            "source:after-record:released",
        ] {
            let late = |case: &&Case| {
                case.point.name == point
                    && case.kind.victim == Victim::DestinationAgent
                    && case.kind.release == Release::Late
            };
            let compared: HashSet<bool> = all.iter().filter(late).map(Case::compares).collect();
            let both = point.ends_with("released");
            assert_eq!(compared.contains(&true), both, "{point}");
            assert!(compared.contains(&false), "{point}");
        }
    }

    #[test]
    fn memory_follows_from_the_switchover_on() {
        let names = [
            "source:before-send:offer",
            "destination:before-send:loading",
            "source:before-send:list",
            "source:after-receipt:missing",
            "source:before-send:resume",
        ];
        let points = names.map(|name| Point::named(name).unwrap());
        let of = |name: &str| -> Vec<Case> {
            let mut universe = universe(&points);
            universe.retain(|case| case.point.name == name);
            universe
        };
        let follows = |case: &Case| case.kind.memory.follows();
        let [offer, loading, list, missing, resume] = names.map(of);
        assert!(!offer.iter().any(follows));
        assert!(!loading.is_empty() && loading.iter().all(follows));
        let shared = |case: &&Case| case.kind.disks == Disks::Shared;
        assert!(list.iter().filter(shared).all(follows));
        assert!(missing.iter().filter(shared).any(follows));
        for case in resume.iter().filter(|case| follows(case)) {
            assert_eq!(case.kind.step, Step::Pulling, "{case}");
        }
    }

    #[test]
    fn names_are_different() {
        let universe = universe(&points());
        let names: HashSet<String> = universe.iter().map(Case::to_string).collect();
        assert_eq!(names.len(), universe.len());
        assert!(names.contains(
            "source-agent:source:after-record:released:7.2-10.0:early:locks-off:later:qcow2:mirror:\
             precopy"
        ));
    }
}
