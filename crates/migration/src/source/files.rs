//! The source's part of the check of shared files: locks on the files of a guest that do not move,
//! and questions about them to the destination.

use crate::channel;
use crate::context::Context;
use crate::files::{Place, Staying, is_file_or_volume, of_guest, open, stands_on};
use channel::TalkError;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::has_open;
use longhaul_hypervisor::manager::Cookie;
use longhaul_protocol::Generation;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::files::{FileClaim, FileKind};
use longhaul_protocol::guest::{Disk, GuestDescription, Managed};
use longhaul_protocol::message::{
    ArbiterQuery, Check, FilesQuery, PortsQuery, Query, ToDestination, ToSource, Verdict,
};
use longhaul_protocol::port::{self, CardPort};
use longhaul_protocol::wire::{VERSION_OF_ARBITERS, VERSION_OF_FILES, VERSION_OF_PORTS};
use longhaul_storage::same_file::HeldLocks;
use longhaul_transport::{ChannelError, Control};
use std::fs::{self, Metadata};
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::task::{block_in_place, spawn_blocking};

/// Time limit for an answer, in addition to the time in which the destination reads files for it.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// The rate at which any destination reads files, in bytes per second.
const READ_BYTES_PER_S: u64 = 16 << 20;

/// The files of a guest that do not move. They are locked until this is dropped.
#[derive(Default)]
pub(crate) struct Held {
    files: Vec<OneFile>,
    claims: Vec<FileClaim>,
}

struct OneFile {
    staying: Staying,
    path: PathBuf,
    _locks: Option<HeldLocks>,
}

/// What a destination is asked about a guest, besides its files and disks.
#[derive(Clone)]
pub(crate) struct Question {
    /// The guest and its machine.
    pub(crate) query: Query,
    /// The generation of the right to run it.
    pub(crate) generation: Generation,
    /// The part of its memory that may follow.
    pub(crate) follows: Pulled,
    /// The arbiter that the handover would have.
    pub(crate) arbiter: Option<ArbiterQuery>,
    /// The program that manages it, and its outlook for the destination's.
    pub(crate) managed: Option<Managed>,
}

/// The answer of a destination.
#[derive(Default)]
pub(crate) struct Asked {
    /// All of its checks.
    pub(crate) checks: Vec<Check>,
    /// The read-only images that it lacks, by name: they have to move along.
    pub(crate) lacking: Vec<String>,
}

/// The reason why there is no answer.
#[derive(Debug)]
pub(crate) enum AskError {
    /// The peer did not answer.
    Talk(TalkError),
    /// This host cannot answer a question of the destination.
    Here(ApiError),
}

impl From<TalkError> for AskError {
    fn from(error: TalkError) -> Self {
        Self::Talk(error)
    }
}

impl From<ChannelError> for AskError {
    fn from(error: ChannelError) -> Self {
        Self::Talk(error.into())
    }
}

/// Locks the files of a guest that do not move. Refuses disk images that are not the files that its
/// QEMU has open.
pub(crate) fn hold(context: &Context, guest: &Guest) -> Result<Held, ApiError> {
    let config = &context.parts.config.hypervisor;
    let mut held = Held::default();
    for place in of_guest(config, guest.description()) {
        let place = place.map_err(|staying| {
            refused(format!("this host does not know {staying} any more"))
                .hint("name it in the agent's configuration")
        })?;
        let mut next = Some(place);
        while let Some(place) = next {
            held.take(&place, guest)?;
            next = stands_on(&place).map_err(|why| {
                refused(format!("{}: {why}", place.staying))
                    .hint("make one plain image of it: qemu-img convert -O qcow2 OLD NEW")
            })?;
        }
    }
    Ok(held)
}

fn refused(text: String) -> ApiError {
    ApiError::new(ErrorCode::Refused, text)
}

/// Returns an error unless the guest's QEMU has this file open.
fn is_used(place: &Place, about: &Metadata, guest: &Guest) -> Result<(), ApiError> {
    let Place { staying, path, .. } = place;
    let used = has_open(guest.pid().unwrap_or_default(), about).map_err(|error| {
        let text = format!("{staying}: cannot tell which file its QEMU uses: {error}");
        refused(text)
    })?;
    if used {
        return Ok(());
    }
    let text = format!(
        "{staying}: {} is not the file that its QEMU uses: it was replaced since, or is another \
         one",
        path.display()
    );
    let hint = "give the file that QEMU uses its name back, or shut the guest down: what it \
                writes now is in a file without this name";
    Err(refused(text).hint(hint))
}

impl Held {
    /// Locks one file.
    fn take(&mut self, place: &Place, guest: &Guest) -> Result<(), ApiError> {
        let Place { staying, path, .. } = place;
        let shown = path.display();
        let about = fs::metadata(path)
            .map_err(|error| refused(format!("{staying}: cannot look at {shown}: {error}")))?;
        if !is_file_or_volume(&about) {
            let text = format!("{staying}: {shown} is no file and no volume");
            return Err(refused(text));
        }
        // For firmware and kernels, the current file of that name counts. QEMU closes kernels after
        // reading them, and packages are upgraded while guests run.
        if matches!(staying.kind, FileKind::Image | FileKind::Backing(_)) {
            is_used(place, &about, guest)?;
        }
        // Without locks, the destination decides whether other proofs or the operator's statement
        // suffice.
        let locks = open(path).and_then(HeldLocks::take);
        let locks = locks
            .inspect_err(|error| tracing::warn!(file = %staying, %error, "cannot be locked"))
            .ok();
        self.claims.push(FileClaim {
            kind: staying.kind,
            name: staying.name.clone(),
            path: path.to_string_lossy().into_owned(),
            locks: locks.as_ref().map(HeldLocks::pattern),
            content: None,
        });
        self.files.push(OneFile {
            path: path.to_owned(),
            staying: staying.clone(),
            _locks: locks,
        });
        Ok(())
    }

    /// Returns whether the guest has no such files.
    pub(crate) fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// Returns the claims about the files.
    pub(crate) fn claims(&self) -> &[FileClaim] {
        &self.claims
    }

    /// Returns the names of the files at these places, which must be read-only images that can move
    /// along.
    fn lacking(&self, guest: &GuestDescription, files: &[u16]) -> Result<Vec<String>, TalkError> {
        let movable = |staying: &&Staying| {
            let image = |disk: &Disk| disk.image == staying.name && disk.moves_if_lacking();
            staying.kind == FileKind::Image && guest.disks.iter().any(image)
        };
        let unfit = TalkError::Unfit("it lacks a file that does not move");
        let named = files.iter().map(|place| {
            let file = self.files.get(usize::from(*place));
            let staying = file.map(|file| &file.staying).filter(movable);
            Ok(staying.ok_or_else(|| unfit.clone())?.name.clone())
        });
        let mut names = named.collect::<Result<Vec<_>, TalkError>>()?;
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Returns the time in which the destination reads the files.
    pub(crate) fn reading_time(&self) -> Duration {
        let contents = self.claims.iter().filter_map(|claim| claim.content);
        let bytes: u64 = contents.map(|content| content.bytes).sum();
        Duration::from_secs(bytes / READ_BYTES_PER_S)
    }

    /// Returns a refusal if the peer is too old to be asked about the files.
    pub(crate) fn unasked(&self, control: &Control) -> Option<Check> {
        let peer = control.peer();
        if self.is_empty() || peer.version >= VERSION_OF_FILES {
            return None;
        }
        let files: Vec<String> = self.files.iter().map(|it| it.staying.to_string()).collect();
        let (host, software) = (&peer.host.name, &peer.software);
        Some(Check {
            verdict: Verdict::Refused,
            text: format!(
                "{host} runs {software:?}, which cannot prove that both hosts have the same {}",
                files.join(", ")
            ),
            hint: Some(format!("update the agent on {host}")),
        })
    }

    /// Adds the digests of these files to their claims.
    async fn say_content(&mut self, context: &Context, wanted: &[u16]) -> Result<(), AskError> {
        for place in wanted {
            let place = usize::from(*place);
            let files = self.files.get(place).zip(self.claims.get_mut(place));
            let new = |(file, claim): &(&OneFile, &mut FileClaim)| {
                file.staying.read_only && claim.content.is_none()
            };
            let Some((file, claim)) = files.filter(new) else {
                return Err(AskError::Talk(TalkError::Unfit(
                    "it asks for what a file holds that it was not asked about, or was told of",
                )));
            };
            let (path, contents) = (file.path.clone(), context.contents.clone());
            let reading = spawn_blocking(move || open(&path).and_then(|file| contents.of(&file)));
            let content = reading
                .await
                .unwrap_or_else(|error| Err(io::Error::other(error)));
            claim.content = Some(content.map_err(|error| {
                let (what, path) = (&file.staying, file.path.display());
                let text = format!("{what}: cannot read {path}: {error}");
                AskError::Here(ApiError::new(ErrorCode::Refused, text))
            })?);
        }
        Ok(())
    }
}

/// Asks a destination for all checks of a move of a guest with these disks and files. `brought`
/// makes disks of the read-only images that it lacks: it is asked for their room too.
pub(crate) async fn ask(
    context: &Context,
    control: &Control,
    question: &Question,
    disks: &[OfferedDisk],
    held: &mut Held,
    brought: impl Fn(&[String]) -> Result<Vec<OfferedDisk>, ApiError>,
) -> Result<Asked, AskError> {
    let mut asked = ask_once(context, control, question.clone(), disks, held).await?;
    asked.checks.extend(unasked_arbiter(control, question));
    if asked.lacking.is_empty() || control.peer().version < VERSION_OF_PORTS {
        return Ok(asked);
    }
    let brought = block_in_place(|| brought(&asked.lacking)).map_err(AskError::Here)?;
    let all: Vec<OfferedDisk> = disks.iter().cloned().chain(brought).collect();
    ask_once(context, control, question.clone(), &all, held).await
}

async fn ask_once(
    context: &Context,
    control: &Control,
    question: Question,
    disks: &[OfferedDisk],
    held: &mut Held,
) -> Result<Asked, AskError> {
    let Question {
        mut query,
        generation,
        follows: memory,
        arbiter,
        managed,
    } = question;
    let ports = port::take(&mut query.guest);
    // An older peer is not asked for its room, and not told of the generation: it refuses the
    // offer.
    let is_old = control.peer().version < VERSION_OF_PORTS;
    let unasked = held
        .unasked(control)
        .or_else(|| unasked_ports(control, &ports));
    if held.is_empty() && is_old || unasked.is_some() {
        let question = ToDestination::Query(Box::new(query));
        return match answer(control, &question, ANSWER_WITHIN).await? {
            ToSource::Answer(answer) => Ok(Asked {
                checks: answer.checks.into_iter().chain(unasked).collect(),
                lacking: Vec::new(),
            }),
            _ => Err(TalkError::Unfit("a question is answered by Answer").into()),
        };
    }
    // Locks are enough for most files. The content of each other file is asked for once.
    for _ in 0..=held.claims.len() {
        let asked = FilesQuery {
            query: query.clone(),
            files: held.claims().to_vec(),
        };
        let question = match is_old {
            true => ToDestination::QueryFiles(Box::new(asked)),
            false => ToDestination::QueryPorts(Box::new(PortsQuery {
                asked,
                ports: ports.clone(),
                disks: disks.to_vec(),
                generation,
                memory,
                arbiter,
                managed: managed.clone(),
            })),
        };
        let limit = ANSWER_WITHIN + held.reading_time();
        match answer(control, &question, limit).await? {
            ToSource::Answer(answer) => {
                return Ok(Asked {
                    checks: answer.checks,
                    lacking: Vec::new(),
                });
            }
            ToSource::AnswerLacking { answer, files } => {
                return Ok(Asked {
                    checks: answer.checks,
                    lacking: held.lacking(&query.guest, &files)?,
                });
            }
            ToSource::WantContent { files } if !files.is_empty() => {
                held.say_content(context, &files).await?;
            }
            _ => break,
        }
    }
    Err(TalkError::Unfit("a question is answered by Answer or WantContent").into())
}

/// Returns what the manager of a guest has for its checks at a destination.
pub(crate) fn outlook(context: &Context, guest: &Guest) -> Result<Option<Managed>, ApiError> {
    let Some(by) = guest.owner().manager() else {
        return Ok(None);
    };
    let found = block_in_place(|| context.parts.guests.outlook(guest));
    let Cookie(cookie) = found.map_err(|error| {
        let text = format!("{by} does not say what {} needs: {error}", guest.name());
        ApiError::new(ErrorCode::Qemu, text)
    })?;
    Ok(Some(Managed { by, cookie }))
}

/// Returns a check if the peer is too old to be asked about the arbiter.
fn unasked_arbiter(control: &Control, question: &Question) -> Option<Check> {
    let peer = control.peer();
    let ArbiterQuery { required, .. } = question.arbiter?;
    if peer.version >= VERSION_OF_ARBITERS {
        return None;
    }
    let (host, software) = (&peer.host.name, &peer.software);
    Some(Check {
        verdict: match required {
            true => Verdict::Refused,
            false => Verdict::Warning,
        },
        text: format!("{host} runs {software:?}, which knows no arbiters"),
        hint: Some(format!("update the agent on {host}")),
    })
}

/// Returns a refusal if the peer is too old to be told of the ports of a guest's cards.
fn unasked_ports(control: &Control, ports: &[CardPort]) -> Option<Check> {
    let peer = control.peer();
    let CardPort { port, .. } = ports.first()?;
    if peer.version >= VERSION_OF_PORTS {
        return None;
    }
    let (host, software) = (&peer.host.name, &peer.software);
    Some(Check {
        verdict: Verdict::Refused,
        text: format!(
            "{host} runs {software:?}, which cannot give a card of the guest the port that it has \
             here: {port}"
        ),
        hint: Some(format!("update the agent on {host}")),
    })
}

async fn answer(
    control: &Control,
    question: &ToDestination,
    limit: Duration,
) -> Result<ToSource, AskError> {
    let channel = control.open().await.map_err(ChannelError::from)?;
    let (mut sender, mut receiver) = channel::as_source(channel);
    sender.send(question)?;
    Ok(receiver.recv_within(limit).await?)
}
