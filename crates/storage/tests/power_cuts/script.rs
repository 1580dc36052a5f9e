//! One script: an agent's work on journals and rights over several lives of the machine, and the
//! checks after each.

use crate::random::Random;
use crate::simulated::{Faults, Simulated};
use longhaul_engine::handover::Record;
use longhaul_protocol::{Attempt, Generation, MigrationId};
use longhaul_storage::{Holder, Journal, JournalError, Journals, Right, Rights, RightsError};
use std::path::Path;
use std::sync::Arc;

const JOURNALS: usize = 2;
const GUESTS: [&str; 2] = ["web", "db"];
/// Limit on operations of the file layer in one life.
const LIFE_MAX: u64 = 40;
const LIVES_MAX: u64 = 8;
/// Space that a journal surely keeps for further records, less than it reserves.
const SURELY_RESERVED: usize = 32 << 10;

/// The required content of a journal.
#[derive(Debug, Default)]
struct Written {
    /// Acknowledged or observed records.
    surely: Vec<Record>,
    /// Records of which one may follow: neither acknowledged nor overwritten by an acknowledged
    /// one.
    perhaps: Vec<Record>,
    /// States that a removed journal may have again.
    before: Vec<Vec<Record>>,
    /// Bytes of records since the first one was acknowledged, if it was.
    since_reserved: Option<usize>,
}

/// The required right of a guest.
#[derive(Debug, Default)]
struct Known {
    surely: Option<Right>,
    perhaps: Vec<Right>,
}

/// The result of a script.
pub struct Outcome {
    pub cuts: u64,
    pub syncs: std::collections::BTreeSet<&'static str>,
    pub wrong: Option<String>,
}

struct Script {
    random: Random,
    files: Simulated,
    faults: Faults,
    written: [Written; JOURNALS],
    known: [Known; GUESTS.len()],
    counter: u32,
    log: Vec<String>,
}

/// The agent's memory, which ends with a life.
struct Agent {
    journals: Journals,
    rights: Rights,
    open: [Option<Journal>; JOURNALS],
}

type Step = Result<(), String>;

/// Runs the script of a seed.
pub fn run(seed: u64, suppressed: Option<&'static str>) -> Outcome {
    let mut random = Random::new(seed);
    let files = Simulated::new(random.next(), suppressed);
    let mut script = Script {
        random,
        files: files.clone(),
        faults: Faults::default(),
        written: Default::default(),
        known: Default::default(),
        counter: 0,
        log: Vec::new(),
    };
    let mut cuts = 0;
    let done = script.lives(&mut cuts);
    let wrong = done
        .err()
        .map(|wrong| format!("{wrong}\n    {}", script.log.join("\n    ")));
    Outcome {
        cuts,
        syncs: files.syncs(),
        wrong,
    }
}

fn id(index: usize) -> MigrationId {
    MigrationId([index as u8; 8])
}

impl Script {
    fn lives(&mut self, cuts: &mut u64) -> Step {
        for _ in 0..1 + self.random.below(LIVES_MAX) {
            let faults = match self.random.below(4) {
                0 => Faults {
                    write_fails: self.random.below(20),
                    sync_fails: self.random.below(30),
                    full: self.random.percent(20),
                },
                _ => Faults::default(),
            };
            let operations = 1 + self.random.below(LIFE_MAX);
            self.power_on(operations, faults);
            self.live(u64::MAX)?;
            // A process that ends leaves its writes behind, synced or not.
            if self.random.percent(70) {
                self.files.cut();
                *cuts += 1;
                self.log.push("-- the power is cut".to_owned());
            } else {
                self.log.push("-- the agent ends".to_owned());
            }
        }
        // Whatever happened, the next agent can work.
        self.power_on(u64::MAX, Faults::default());
        let mut agent = self.agent()?.ok_or("the folders cannot be used")?;
        for index in 0..JOURNALS {
            self.open(&mut agent, index)?;
            self.append(&mut agent, index)?;
        }
        (0..GUESTS.len()).try_for_each(|guest| self.get(&agent, guest))?;
        self.live(10)
    }

    fn power_on(&mut self, operations: u64, faults: Faults) {
        self.faults = faults;
        self.files.power_on(operations, faults);
    }

    /// Returns whether an error has a cause in the file system.
    fn excused(&self) -> bool {
        let Faults {
            write_fails,
            sync_fails,
            full,
        } = self.faults;
        !self.files.is_on() || full || write_fails > 0 || sync_fails > 0
    }

    fn excuse<T>(&self, what: &str, error: &impl std::fmt::Display) -> Result<Option<T>, String> {
        match self.excused() {
            true => Ok(None),
            false => Err(format!("{what}: {error}")),
        }
    }

    fn agent(&mut self) -> Result<Option<Agent>, String> {
        let files = Arc::new(self.files.clone());
        let journals = match Journals::open_in(files.clone(), Path::new("/state/journal")) {
            Ok(journals) => journals,
            Err(error) => return self.excuse("opening the journals", &error),
        };
        match Rights::open_in(files, Path::new("/state/rights")) {
            Ok(rights) => Ok(Some(Agent {
                journals,
                rights,
                open: Default::default(),
            })),
            Err(error) => self.excuse("opening the rights", &error),
        }
    }

    fn live(&mut self, steps: u64) -> Step {
        let Some(mut agent) = self.agent()? else {
            return Ok(());
        };
        for _ in 0..steps {
            if !self.files.is_on() {
                break;
            }
            let index = self.random.below(JOURNALS as u64) as usize;
            let guest = self.random.below(GUESTS.len() as u64) as usize;
            match self.random.below(12) {
                0..6 if agent.open[index].is_some() => self.append(&mut agent, index)?,
                0..6 => self.open(&mut agent, index)?,
                6 if self.random.percent(20) => self.remove(&mut agent, index)?,
                6 => agent.open[index] = None,
                7 => self.list(&agent)?,
                8 | 9 => self.set(&agent, guest)?,
                10 => self.give_back(&agent, guest)?,
                _ => self.get(&agent, guest)?,
            }
        }
        Ok(())
    }

    fn open(&mut self, agent: &mut Agent, index: usize) -> Step {
        agent.open[index] = None;
        let journal = match Journal::open(&agent.journals, id(index)) {
            Ok(journal) => journal,
            Err(error @ JournalError::Io { .. }) => {
                return self
                    .excuse("opening a journal", &error)
                    .map(|_: Option<()>| ());
            }
            Err(error) => return Err(format!("opening a journal: {error}")),
        };
        let written = &mut self.written[index];
        let found = journal.records();
        self.log
            .push(format!("journal {index} has {}", show(found)));
        let fits = |surely: &[Record]| match found.strip_prefix(surely) {
            Some([]) => true,
            Some([more]) => written.perhaps.contains(more),
            Some(_) | None => false,
        };
        if !fits(&written.surely) && !written.before.iter().any(|before| before == found) {
            return Err(format!(
                "journal {index} has {}, and should have {} and at most one of {}",
                show(found),
                show(&written.surely),
                show(&written.perhaps)
            ));
        }
        // The absence of a removed journal is not guaranteed.
        if !found.is_empty() {
            written.before.clear();
        }
        written.surely = found.to_vec();
        written.perhaps.clear();
        agent.open[index] = Some(journal);
        Ok(())
    }

    fn append(&mut self, agent: &mut Agent, index: usize) -> Step {
        let Some(journal) = &mut agent.open[index] else {
            return Ok(());
        };
        self.counter += 1;
        let attempt = Attempt(self.counter);
        let long = self.random.below(1500) as usize;
        let record = match self.random.below(3) {
            0 => Record::Ready { attempt },
            1 => Record::Released {
                attempt,
                generation: Generation(7),
            },
            _ => Record::Aborted {
                attempt,
                reason: "x".repeat(long),
            },
        };
        let appended = journal.append_at(u64::from(self.counter), &record);
        let outcome = match &appended {
            Ok(()) => "done".to_owned(),
            Err(error) => error.to_string(),
        };
        self.log.push(format!(
            "journal {index}: append {}: {outcome}",
            show(std::slice::from_ref(&record))
        ));
        let written = &mut self.written[index];
        match appended {
            Ok(()) => {
                let first = written.surely.is_empty();
                written.surely.push(record);
                written.perhaps.clear();
                written.before.clear();
                match &mut written.since_reserved {
                    Some(bytes) => *bytes += long + 64,
                    None if first => written.since_reserved = Some(0),
                    None => {}
                }
                Ok(())
            }
            Err(error) => {
                written.perhaps.push(record);
                let reserved = written
                    .since_reserved
                    .is_some_and(|bytes| bytes < SURELY_RESERVED);
                let faults = self.faults;
                let only_full = faults.full && faults.write_fails == 0 && faults.sync_fails == 0;
                if only_full && reserved && self.files.is_on() {
                    return Err(format!(
                        "a full disk keeps an end from being noted: {error}"
                    ));
                }
                self.excuse("appending", &error).map(|_: Option<()>| ())
            }
        }
    }

    fn remove(&mut self, agent: &mut Agent, index: usize) -> Step {
        let Some(journal) = agent.open[index].take() else {
            return Ok(());
        };
        self.log.push(format!("journal {index} is removed"));
        let removed = journal.remove();
        let written = &mut self.written[index];
        let surely = std::mem::take(&mut written.surely);
        for more in std::mem::take(&mut written.perhaps) {
            written.before.push([&surely[..], &[more]].concat());
        }
        written.before.push(surely);
        written.since_reserved = None;
        match removed {
            Ok(()) => Ok(()),
            Err(error) => self.excuse("removing", &error).map(|_: Option<()>| ()),
        }
    }

    fn list(&mut self, agent: &Agent) -> Step {
        let listed = match Journal::list(&agent.journals) {
            Ok(listed) => listed,
            Err(error) => return self.excuse("listing", &error).map(|_: Option<()>| ()),
        };
        let missing = |index: &usize| {
            !self.written[*index].surely.is_empty() && !listed.contains(&id(*index))
        };
        match (0..JOURNALS).find(missing) {
            Some(index) => Err(format!("journal {index} is not listed")),
            None => Ok(()),
        }
    }

    fn a_right(&mut self, guest: usize) -> Right {
        let known = &self.known[guest];
        let newest = known.surely.iter().chain(&known.perhaps);
        let newest = newest.map(|right| right.generation.0).max().unwrap_or(1);
        self.counter += 1;
        // Different lengths and places: records grow with the host's name.
        let host = "h".repeat(1 + self.random.below(900) as usize) + &self.counter.to_string();
        Right {
            guest: GUESTS[guest].to_owned(),
            generation: Generation(newest + self.random.below(2)),
            holder: match self.random.below(3) {
                0 => Holder::Here,
                1 => Holder::Elsewhere { host },
                _ => Holder::InDoubt { host },
            },
        }
    }

    fn set(&mut self, agent: &Agent, guest: usize) -> Step {
        let right = self.a_right(guest);
        let set = agent.rights.set(&right);
        self.noted(guest, right, set)
    }

    fn give_back(&mut self, agent: &Agent, guest: usize) -> Step {
        let Some(expected) = self.known[guest].surely.clone() else {
            return Ok(());
        };
        let mut right = self.a_right(guest);
        right.generation = Generation(expected.generation.0.saturating_sub(1));
        let given = agent.rights.give_back(&expected, &right);
        self.noted(guest, right, given)
    }

    fn noted(&mut self, guest: usize, right: Right, noted: Result<(), RightsError>) -> Step {
        let outcome = match &noted {
            Ok(()) => "done".to_owned(),
            Err(error) => error.to_string(),
        };
        let generation = right.generation.0;
        let change = format!("{}: generation {generation}: {outcome}", right.guest);
        self.log.push(change.chars().take(200).collect());
        let known = &mut self.known[guest];
        match noted {
            Ok(()) => {
                known.surely = Some(right);
                known.perhaps.clear();
                Ok(())
            }
            // A failed write may have been recorded nevertheless.
            Err(RightsError::Older { .. } | RightsError::NotGivenBack { .. }) => {
                match known.perhaps.is_empty() {
                    true => Err("a right is refused".to_owned()),
                    false => Ok(()),
                }
            }
            Err(error @ RightsError::Malformed { .. }) => Err(error.to_string()),
            Err(error @ RightsError::Io { .. }) => {
                known.perhaps.push(right);
                self.excuse("noting a right", &error)
                    .map(|_: Option<()>| ())
            }
        }
    }

    fn get(&mut self, agent: &Agent, guest: usize) -> Step {
        let found = match agent.rights.get(GUESTS[guest]) {
            Ok(found) => found,
            Err(error @ RightsError::Malformed { .. }) => return Err(error.to_string()),
            Err(error) => {
                return self
                    .excuse("reading a right", &error)
                    .map(|_: Option<()>| ());
            }
        };
        let known = &mut self.known[guest];
        let good = found == known.surely
            || found
                .as_ref()
                .is_some_and(|found| known.perhaps.contains(found));
        if !good {
            let found = found.map_or("nothing".to_owned(), |right| right.to_string());
            return Err(format!("the right found is {found}, not {known:?}"));
        }
        known.surely = found;
        known.perhaps.clear();
        Ok(())
    }
}

fn show(records: &[Record]) -> String {
    let shown: Vec<String> = records
        .iter()
        .map(|record| match record {
            Record::Aborted { attempt, reason } => format!("{}+{}", attempt.0, reason.len()),
            other => other.attempt().0.to_string(),
        })
        .collect();
    format!("[{}]", shown.join(" "))
}
