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
    /// The connection between the agents is closed.
    Connection,
    /// The link is cut for a while.
    Link,
    /// The write of a record fails, or is reported as failed.
    Record,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::BothAgents,
        Self::SourceQemu,
        Self::DestinationQemu,
        Self::SourceFront,
        Self::DestinationFront,
        Self::SourceSupervisor,
        Self::DestinationSupervisor,
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
}

impl Kind {
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
            ..
        } = self.kind;
        write!(
            f,
            "{}:{}:{}:{}:{}:{}:{}:{}",
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
            disks.name()
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
            Victim::SourceQemu => !matches!(step, Step::Asking | Step::Done),
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
        // disk export has the lock from the beginning.
        let refuses = step != Step::Returning || (locks && !disks.leaves());
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
            Disks::Shared => !self.point.needs_local_disks(),
            _ => !self.point.needs_shared_disks(),
        };
        // With hybrid few blocks of a disk are missing: the guest may not access them, and in an
        // image that grows their place is unknown.
        let left = match (step, disks) {
            (Step::Pulling, Disks::Hybrid) => {
                format == Format::Raw && !self.point.needs_the_guest()
            }
            (Step::Pulling, _) => disks.leaves(),
            _ => true,
        };
        // A shared disk is not touched, whatever its format.
        let made = disks != Disks::Shared || format == Format::Raw;
        let met = passes && told && left && made && step != Step::Elsewhere;
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

/// Returns the step of a point when disks move in this way: missing blocks arrive over a connection
/// that is made again.
fn step_of(point: &Point, disks: Disks) -> Step {
    match point.step {
        Step::Resuming if disks.leaves() => Step::Pulling,
        step => step,
    }
}

fn of_every_format(disks: Disks) -> [(Disks, Format); 2] {
    [Format::Raw, Format::Qcow2].map(|format| (disks, format))
}

/// Returns all variants of a victim at a point with a pair of QEMUs.
fn variants(victim: Victim, point: &Point, pair: Pair) -> Vec<Case> {
    let mut cases = Vec::new();
    for locks in [false, true] {
        for back in [Back::AtOnce, Back::Later] {
            for release in [Release::Late, Release::Early] {
                for (disks, format) in Disks::ALL.into_iter().flat_map(of_every_format) {
                    let kind = Kind {
                        victim,
                        step: step_of(point, disks),
                        release,
                        pair,
                        locks,
                        back,
                        disks,
                        format,
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
/// rotating pair and an early one. Locks, the time away, disks and their image formats alternate.
pub fn all(mut universe: Vec<Case>) -> Vec<Case> {
    // Stable: the order of the steps is kept.
    universe.sort_by_key(|case| (case.kind.release, case.kind.victim));
    let alike = |one: &Case, next: &Case| key(one) == key(next);
    let mut chosen = Vec::new();
    for (number, same) in universe.chunk_by(alike).enumerate() {
        chosen.extend(same.get(number % same.len()).cloned());
    }
    chosen
}

/// Returns the key by which cases of `all` differ.
fn key(case: &Case) -> (Release, Victim, String, Option<Pair>) {
    let kind = case.kind;
    let pair = (kind.release == Release::Late).then_some(kind.pair);
    (kind.release, kind.victim, case.point.name.clone(), pair)
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
    fn names_are_different() {
        let universe = universe(&points());
        let names: HashSet<String> = universe.iter().map(Case::to_string).collect();
        assert_eq!(names.len(), universe.len());
        assert!(names.contains(
            "source-agent:source:after-record:released:7.2-10.0:early:locks-off:later:qcow2:mirror"
        ));
    }
}
