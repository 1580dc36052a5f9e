//! Implements `longhaul journal`: reads the files of journals themselves, so it needs no agent.

use crate::cli::args::JournalCommand;
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::{set_aside, show};
use longhaul_engine::handover::{Record, Side};
use longhaul_migration::host::config::Config;
use longhaul_protocol::MigrationId;
use longhaul_storage::{
    Ending, Entry, JournalError, Reading, SetAside, file_name, list_journals, list_set_aside,
    read_journal,
};
use serde::Serialize;
use std::path::{Path, PathBuf};

const WHOSE: &str = "the state folder is the agent's: read it as the agent's user (mostly root), \
    or name another one with --state";

/// One journal.
#[derive(Debug, Serialize)]
pub(crate) struct Journal {
    /// The migration, from the file's name or its records.
    pub(crate) migration: Option<String>,
    pub(crate) file: PathBuf,
    /// The beginning of its attempt; `None` where no attempt began.
    pub(crate) attempt: Option<Beginning>,
    pub(crate) records: Vec<Entered>,
    /// The end of the last record, in bytes.
    pub(crate) end: u64,
    /// The state of the file after it.
    pub(crate) ending: End,
    pub(crate) may_run: MayRun,
    /// The migration of a later journal of this guest in the same folder.
    pub(crate) later: Option<String>,
}

/// The beginning of the latest attempt.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Beginning {
    pub(crate) guest: String,
    /// This host's side.
    #[serde(serialize_with = "side_name")]
    pub(crate) side: Side,
    pub(crate) other_host: String,
}

/// One record.
#[derive(Debug, Serialize)]
pub(crate) struct Entered {
    pub(crate) offset: u64,
    pub(crate) unix_ms: u64,
    pub(crate) record: &'static str,
    pub(crate) attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) generation: Option<u64>,
    /// The meaning.
    pub(crate) text: String,
}

/// The state of a journal's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Whole,
    /// This number of bytes of a record.
    CutOff(u64),
    Damaged,
    /// A record of a newer version, by its number.
    Unknown(u32),
}

/// The host that may run the guest, according to one journal alone; a later journal of the guest
/// overrides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MayRun {
    /// This host.
    Here,
    /// The other host.
    There,
    /// The other host, or neither: this one has never had the right.
    NotHere,
    /// Decided by the other host's journal only.
    InDoubt,
    /// The journal does not say, or cannot be trusted.
    Unknown,
}

/// A file that is not a readable journal.
#[derive(Debug, Serialize)]
pub(crate) struct Unread {
    pub(crate) migration: String,
    pub(crate) error: String,
}

/// The journals of a folder.
#[derive(Debug, Serialize)]
pub(crate) struct Journals {
    pub(crate) folder: PathBuf,
    pub(crate) journals: Vec<Journal>,
    pub(crate) unread: Vec<Unread>,
    /// Those that were set aside, by their tombstones.
    pub(crate) set_aside: Vec<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(output: &Output, command: JournalCommand) -> Result<u8, CliError> {
    let args = match command {
        JournalCommand::Show(args) => args,
        JournalCommand::SetAside(args) => return set_aside::run(output, &args),
    };
    let (state, config) = (args.state.as_deref(), args.config.as_deref());
    let Some(wanted) = &args.journal else {
        let journals = Journals::read(folder(state, config)?)?;
        let bad = !journals.unread.is_empty() || journals.journals.iter().any(Journal::is_bad);
        super::show(output, &journals, || show::journal::list(&journals))?;
        return Ok(u8::from(bad));
    };
    let path = if wanted.contains('/') || wanted.ends_with(".journal") {
        PathBuf::from(wanted)
    } else {
        let folder = folder(state, config)?;
        let migration = find(&folder, wanted)?;
        folder.join(file_name(migration))
    };
    let reading = read_journal(&path).map_err(|error| unreadable(&error))?;
    let beside = path.parent().map_or_else(PathBuf::new, Path::to_owned);
    let mut journal = Journal::of(path, &reading);
    journal.note_later(&Journals::read(beside)?.journals);
    super::show(output, &journal, || show::journal::journal(&journal))?;
    Ok(u8::from(journal.is_bad()))
}

/// Returns the folder of journals in the agent's state folder.
fn folder(state: Option<&Path>, config: Option<&Path>) -> Result<PathBuf, CliError> {
    Ok(state_folder(state, config)?.join("journal"))
}

/// Returns the agent's state folder.
pub(crate) fn state_folder(
    state: Option<&Path>,
    config: Option<&Path>,
) -> Result<PathBuf, CliError> {
    let state = match state {
        Some(state) => state.to_owned(),
        None => Config::read(config)?.state,
    };
    if let Err(error) = std::fs::metadata(&state) {
        let message = format!("cannot use the state folder {}: {error}", state.display());
        return Err(CliError::journal(message, Some(WHOSE)));
    }
    Ok(state)
}

pub(crate) fn find(folder: &Path, wanted: &str) -> Result<MigrationId, CliError> {
    let all = list_journals(folder).map_err(|error| unreadable(&error))?;
    let mut found = all
        .into_iter()
        .filter(|id| id.to_string().starts_with(&wanted.to_lowercase()));
    match (found.next(), found.next()) {
        (Some(id), None) => Ok(id),
        (Some(_), Some(_)) => Err(CliError::usage(
            format!("several journals begin with {wanted}"),
            "give more of the migration's id: `longhaul journal show` lists them",
        )),
        (None, _) => Err(CliError::usage(
            format!("no journal in {} begins with {wanted}", folder.display()),
            "`longhaul journal show` lists them; a file is given with its folder: ./NAME.journal",
        )),
    }
}

pub(crate) fn unreadable(error: &JournalError) -> CliError {
    let hint = matches!(error, JournalError::Io { .. }).then_some(WHOSE);
    CliError::journal(error.to_string(), hint)
}

impl Journals {
    fn read(folder: PathBuf) -> Result<Self, CliError> {
        let ids = list_journals(&folder).map_err(|error| unreadable(&error))?;
        let mut journals = Self {
            folder,
            journals: Vec::new(),
            unread: Vec::new(),
            set_aside: Vec::new(),
        };
        let set_aside = list_set_aside(&journals.folder).map_err(|error| unreadable(&error))?;
        journals.set_aside = set_aside
            .into_iter()
            .map(|id| SetAside::of(&journals.folder, id).tombstone)
            .collect();
        for id in ids {
            let path = journals.folder.join(file_name(id));
            match read_journal(&path) {
                Ok(reading) => journals.journals.push(Journal::of(path, &reading)),
                Err(error) => journals.unread.push(Unread {
                    migration: id.to_string(),
                    error: error.to_string(),
                }),
            }
        }
        let all = &mut journals.journals;
        all.sort_by_key(|journal| journal.records.last().map(|record| record.unix_ms));
        for index in 0..all.len() {
            let (journal, later) = all[index..].split_at_mut(1);
            journal.iter_mut().for_each(|one| one.note_later(later));
        }
        Ok(journals)
    }
}

impl Journal {
    /// Returns the meaning of a journal's records.
    pub(crate) fn of(file: PathBuf, reading: &Reading) -> Self {
        let mut attempt: Option<Beginning> = None;
        let mut migration = None;
        let mut may_run = MayRun::Unknown;
        let mut records = Vec::new();
        for entry in &reading.entries {
            if let Record::Began {
                migration: id,
                side,
                guest,
                peer_name,
                ..
            } = &entry.record
            {
                migration = Some(*id);
                attempt = Some(Beginning {
                    guest: guest.clone(),
                    side: *side,
                    other_host: peer_name.clone(),
                });
            }
            // To a question about an unknown attempt, a destination answers ABORTED.
            let side = attempt
                .as_ref()
                .map_or(Side::Destination, |began| began.side);
            may_run = show::journal::may_run(&entry.record, side).unwrap_or(may_run);
            records.push(entered(entry, attempt.as_ref()));
        }
        let ending = match reading.ending {
            Ending::Whole => End::Whole,
            Ending::CutOff(bytes) => End::CutOff(bytes),
            Ending::Damaged => End::Damaged,
            Ending::Unknown(number) => End::Unknown(number),
        };
        let named = file
            .file_stem()
            .and_then(|name| name.to_str()?.parse().ok());
        let mut journal = Self {
            migration: migration.or(named).map(|id| id.to_string()),
            file,
            attempt,
            records,
            end: reading.end,
            ending,
            may_run,
            later: None,
        };
        if journal.is_bad() {
            journal.may_run = MayRun::Unknown;
        }
        journal
    }

    /// Returns the key that orders journals: a later one has a higher generation, or the same and
    /// was begun later.
    fn order(&self) -> (Option<u64>, Option<u64>) {
        let generations = self.records.iter().map(|record| record.generation);
        let began = self.records.first().map(|record| record.unix_ms);
        (generations.flatten().max(), began)
    }

    fn note_later(&mut self, others: &[Journal]) {
        let guest = self.attempt.as_ref().map(|attempt| &attempt.guest);
        let same = |other: &&Journal| {
            let others = other.attempt.as_ref().map(|attempt| &attempt.guest);
            guest.is_some() && others == guest && other.order() > self.order()
        };
        let latest = others.iter().filter(same).max_by_key(|other| other.order());
        self.later = latest.and_then(|other| other.migration.clone());
    }

    fn is_bad(&self) -> bool {
        match self.ending {
            End::Whole | End::CutOff(_) => false,
            End::Damaged | End::Unknown(_) => true,
        }
    }
}

fn entered(entry: &Entry, attempt: Option<&Beginning>) -> Entered {
    let words = show::journal::words(&entry.record, attempt);
    Entered {
        offset: entry.offset,
        unix_ms: entry.unix_ms,
        record: words.name,
        attempt: entry.record.attempt().0,
        generation: words.generation.map(|generation| generation.0),
        text: words.text,
    }
}

fn side_name<S: serde::Serializer>(side: &Side, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match side {
        Side::Source => "source",
        Side::Destination => "destination",
    })
}
