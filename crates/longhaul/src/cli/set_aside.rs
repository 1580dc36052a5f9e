//! Implements `longhaul journal set-aside`: takes a damaged journal out of the agent's way, after a
//! person has settled where its guest runs.

use crate::cli::args::{Belongs, SetAsideArgs};
use crate::cli::error::CliError;
use crate::cli::journal::{find, state_folder, unreadable};
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use longhaul_engine::handover::{Record, Side};
use longhaul_migration::host::state::StateLock;
use longhaul_protocol::Generation;
use longhaul_storage::files::RealFiles;
use longhaul_storage::{
    Holder, JournalError, Right, Rights, file_name, read_journal, read_sound_journal, set_aside,
};
use std::path::Path;

/// The latest attempt that the readable part of a journal tells of.
struct Began {
    guest: String,
    side: Side,
    generation: Generation,
    other_host: String,
}

/// Runs the command.
pub(crate) fn run(output: &Output, args: &SetAsideArgs) -> Result<u8, CliError> {
    let state = state_folder(args.state.as_deref(), args.config.as_deref())?;
    let folder = state.join("journal");
    let migration = find(&folder, &args.migration)?;
    let _lock = StateLock::take(&state).map_err(|error| {
        let hint = "no agent may run meanwhile: systemctl stop longhaul-agent (guests go on \
                    running)";
        CliError::journal(error.to_string(), Some(hint))
    })?;
    let path = folder.join(file_name(migration));
    let damage = damage(&path, args.although_sound)?;
    let began = began(&path);
    let guest = guest(args, began.as_ref())?;
    let right = match guest {
        Some(guest) => {
            let rights = Rights::open(&state.join("rights")).map_err(|error| failed(&error))?;
            let stored = rights.get(guest).map_err(|error| failed(&error))?;
            let right = right(args, guest, began.as_ref(), stored)?;
            if let Some(right) = &right {
                rights.set(right).map_err(|error| failed(&error))?;
            }
            right
        }
        None => None,
    };
    let because = args.because.as_deref().unwrap_or("no reason was given");
    let shown_guest = guest.unwrap_or("unknown");
    let why = format!(
        "The journal of migration {migration} (guest: {shown_guest}) was set aside, because \
         {damage}.\nReason: {because}\nAs long as this file is here, agents answer no question \
         about the migration. Remove it when no other host has a journal of it.\n"
    );
    let names = set_aside(&RealFiles, &folder, migration, &why);
    let names = names.map_err(|error| unreadable(&error))?;
    let content = serde_json::json!({
        "migration": migration.to_string(),
        "guest": guest,
        "right": right,
        "journal": names.journal,
        "tombstone": names.tombstone,
    });
    super::show(output, &content, || {
        let done = format!("set aside: {}", names.journal.display());
        let mut lines = vec![Line::default().tone(Tone::Good, "✓ ").plain(done)];
        if let Some(right) = &right {
            lines.push(Line::text(format!("  {} is in {right}", right.guest)));
        }
        lines.push(Line::text(format!(
            "  no question about the migration is answered as long as {} is there",
            names.tombstone.display()
        )));
        lines.push(Line::text(
            "  start the agent: systemctl start longhaul-agent",
        ));
        lines
    })?;
    Ok(0)
}

fn failed(error: &dyn std::fmt::Display) -> CliError {
    CliError::journal(error.to_string(), None)
}

/// Why an agent cannot use a journal; an error where it can, or where a newer one can.
fn damage(path: &Path, although_sound: bool) -> Result<String, CliError> {
    match read_sound_journal(path) {
        Ok(_) if although_sound => Ok("an operator gave it up".to_owned()),
        Ok(_) => Err(CliError::usage(
            format!("{} is sound: agents can use it", path.display()),
            "a migration in doubt is ended by `longhaul resolve`; if the other host's journal of \
             it is gone: --although-sound --belongs here|there",
        )),
        Err(error) if error.is_newer() => Err(CliError::journal(
            error.to_string(),
            Some("start the version of Longhaul that wrote it"),
        )),
        Err(error) if error.is_of_the_file() => Ok(short(&error, path)),
        Err(error) => Err(unreadable(&error)),
    }
}

fn short(error: &JournalError, path: &Path) -> String {
    match error {
        JournalError::Damaged { offset, .. } => {
            format!("{} is damaged at byte {offset}", path.display())
        }
        other => other.to_string(),
    }
}

fn began(path: &Path) -> Option<Began> {
    let reading = read_journal(path).ok()?;
    reading.entries.into_iter().rev().find_map(|entry| {
        let Record::Began {
            side,
            guest,
            generation,
            peer_name,
            ..
        } = entry.record
        else {
            return None;
        };
        Some(Began {
            guest,
            side,
            generation,
            other_host: peer_name,
        })
    })
}

fn guest<'a>(
    args: &'a SetAsideArgs,
    began: Option<&'a Began>,
) -> Result<Option<&'a str>, CliError> {
    let named = args.guest.as_deref();
    match (began, named) {
        (Some(began), Some(named)) if began.guest != named => Err(CliError::usage(
            format!("the journal is of {}, and not of {named}", began.guest),
            "leave --guest out",
        )),
        (Some(began), _) => Ok(Some(&began.guest)),
        (None, None) if args.belongs.is_some() => Err(CliError::usage(
            "the journal does not say whose it is",
            "add --guest NAME: the other host's journal of this migration names it",
        )),
        (None, named) => Ok(named),
    }
}

/// The right to run the guest as the person says, where that is not noted yet.
fn right(
    args: &SetAsideArgs,
    guest: &str,
    began: Option<&Began>,
    stored: Option<Right>,
) -> Result<Option<Right>, CliError> {
    let next = |generation: Generation| Generation(generation.0 + 1);
    let of = |generation, holder| {
        Some(Right {
            guest: guest.to_owned(),
            generation,
            holder,
        })
    };
    match (args.belongs, stored) {
        (None, Some(right)) if matches!(right.holder, Holder::InDoubt { .. }) => {
            Err(CliError::usage(
                format!("who may run {guest} is {}", right.holder),
                "read the other host's journal of this migration (longhaul journal show), and say \
                 it: --belongs here|there",
            ))
        }
        (None, _) => Ok(None),
        (Some(Belongs::Here), Some(right)) if right.holder == Holder::Here => Ok(None),
        // A generation above the one that the other host may have.
        (Some(Belongs::Here), Some(right)) => Ok(of(next(right.generation), Holder::Here)),
        (Some(Belongs::Here), None) => {
            let came = began.filter(|began| began.side == Side::Destination);
            Ok(came.and_then(|began| of(next(began.generation), Holder::Here)))
        }
        (Some(Belongs::There), stored) => {
            let (known, generation) = match stored {
                Some(Right {
                    holder: Holder::Here,
                    generation,
                    ..
                }) => (None, next(generation)),
                Some(Right {
                    holder: Holder::Elsewhere { host } | Holder::InDoubt { host },
                    generation,
                    ..
                }) => (Some(host), generation),
                None => {
                    let before = began.map_or(Generation(1), |began| began.generation);
                    (None, next(before))
                }
            };
            let host = args.other_host.clone().or(known);
            let host = host.or_else(|| began.map(|began| began.other_host.clone()));
            let host = host.ok_or_else(|| {
                CliError::usage(
                    format!("no record here names the host that {guest} belongs to"),
                    "add --other-host NAME",
                )
            })?;
            Ok(of(generation, Holder::Elsewhere { host }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(belongs: Option<Belongs>) -> SetAsideArgs {
        SetAsideArgs {
            migration: "7f".to_owned(),
            belongs,
            other_host: None,
            guest: None,
            although_sound: false,
            because: None,
            state: None,
            config: None,
        }
    }

    fn stored(generation: u64, holder: Holder) -> Option<Right> {
        Some(Right {
            guest: "web-7".to_owned(),
            generation: Generation(generation),
            holder,
        })
    }

    #[test]
    fn the_right_is_what_the_person_says() {
        let host = || "paris-2".to_owned();
        let (here, there) = (Holder::Here, Holder::Elsewhere { host: host() });
        let doubt = Holder::InDoubt { host: host() };
        let began = |side| Began {
            guest: "web-7".to_owned(),
            side,
            generation: Generation(6),
            other_host: host(),
        };
        let source = began(Side::Source);
        let of = |belongs, before: &Option<Right>| {
            right(&args(belongs), "web-7", Some(&source), before.clone()).unwrap()
        };
        let in_doubt = stored(7, doubt);
        assert_eq!(of(Some(Belongs::Here), &in_doubt), stored(8, here.clone()));
        assert_eq!(
            of(Some(Belongs::There), &in_doubt),
            stored(7, there.clone())
        );
        let ours = stored(6, here.clone());
        assert_eq!(of(Some(Belongs::Here), &ours), None);
        assert_eq!(of(Some(Belongs::There), &ours), stored(7, there.clone()));
        assert_eq!(of(None, &ours), None);
        assert_eq!(of(Some(Belongs::There), &None), stored(7, there));
        assert_eq!(of(Some(Belongs::Here), &None), None);
        let come = began(Side::Destination);
        let come = right(&args(Some(Belongs::Here)), "web-7", Some(&come), None);
        assert_eq!(come.unwrap(), stored(7, here));
        let error = right(&args(None), "web-7", Some(&source), in_doubt).unwrap_err();
        assert_eq!(error.exit_code, 2);
        let unknown = right(&args(Some(Belongs::There)), "web-7", None, None);
        assert_eq!(unknown.unwrap_err().exit_code, 2);
    }
}
