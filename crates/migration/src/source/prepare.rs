//! Preparation of a departure: finds the guest, checks everything, and has the destination launch a
//! QEMU for it. A failure leaves the guest as it was.

use crate::context::Context;
use crate::handover::ledger::{Ledger, SourceHandover};
use crate::host::fail_point;
use crate::host::task;
use crate::limits::bandwidth::Share;
use crate::limits::shared_dedup::Gang;
use crate::source::Source;
use crate::source::arbiter::{self, Agreed, agree};
use crate::source::attempt::{SourceAttempt, Task};
use crate::source::candidate::{Candidate, candidate, is_paused};
use crate::source::checks::{self, Examined};
use crate::source::companion::{About, Companions};
use crate::source::connect::{self, OFFER_WITHIN, Session};
use crate::source::convergence;
use crate::source::files::{self, AskError, Asked as Answered, Held, Question};
use crate::source::local_disks::{self, Known, may_be_left};
use crate::source::memory_strategy::{check_keeping, follows_by, of_memory, too_old_to_follow};
use crate::source::plan;
use crate::source::prediction::Look;
use crate::source::qemu::{SourceQemu, SourceQemuError};
use crate::source::recovered::RecoveredSource;
use crate::source::sample;
use crate::source::sender::{Encoding, Sending};
use crate::source::tracking::end_before_move;
use crate::source::verified_ranges::Checked;
use crate::status::failure;
use crate::status::guest_rate::RateMeter;
use crate::status::migration::{Entry, Facts};
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{ApiError, Asked, BaseChoice, DiskChoice, ErrorCode, Side, StartMigration};
use longhaul_attempt::Source as Core;
use longhaul_attempt::source::Config;
use longhaul_codec::DigestKey;
use longhaul_engine::handover::{self, Record, Terms};
use longhaul_engine::source::{Source as Engine, SourceError};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::{Cookie, Lease};
use longhaul_hypervisor::memory::OutgoingError;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::guest::Managed;
use longhaul_protocol::message::{
    DisksOffer, FilesOffer, Keeps, Offer, PortsOffer, Query, ToDestination, ToSource, Verdict,
};
use longhaul_protocol::port;
use longhaul_protocol::wire::{VERSION_OF_PORTS, VERSION_OF_POSTCOPY, VERSION_OF_RUNS};
use longhaul_protocol::{Attempt, BLOCK_SIZE, Generation, MigrationId};
use longhaul_storage::Journal;
use longhaul_transport::{CloseCode, Control};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::block_in_place;
use tokio::time::timeout;

/// Estimated duration of a switchover without the last pages and round trips, before anything is
/// measured.
const SWITCH_OVERHEAD: Duration = Duration::from_millis(60);
/// Time limit for the destination to confirm that an offer is withdrawn.
const WITHDRAW_WITHIN: Duration = Duration::from_secs(10);

/// Longest name of a group, in bytes.
const GROUP_BYTES_MAX: usize = 64;

/// Begins a migration in a task of its own.
pub(crate) fn start(
    context: &Arc<Source>,
    request: StartMigration,
) -> Result<Arc<Entry>, ApiError> {
    convergence::check(&request.convergence)?;
    check_keeping(request.strategy, request.keep_memory)?;
    if let Some(group) = &request.group {
        check_group(group)?;
    }
    let candidate = candidate(context, &request.guest, &request.to)?;
    let mut id = [0; 8];
    let gang = getrandom::fill(&mut id).and_then(|()| context.gangs.leaving_for(candidate.host.id));
    let gang = gang.map_err(|error| failure::internal(&format!("no random numbers: {error}")))?;
    let id = MigrationId(id);
    let reservation = context
        .registry
        .take(&request.guest, Taken::Moving(id, Side::Source))?;
    let entry = Arc::new(Entry::new(Facts {
        id,
        guest: request.guest.clone(),
        side: Side::Source,
        source: context.parts.config.name.clone(),
        destination: request.to.clone(),
        strategy: request.strategy,
        asked: Asked::from(&request),
    }));
    context.registry.add(entry.clone());
    let share = context.throttle.join(request.group.as_deref());
    let (source, shown) = (context.clone(), entry.clone());
    task::spawn(async move {
        let preparing = Preparing {
            source,
            entry,
            candidate,
            request,
            gang,
            share,
        };
        preparing.run(reservation).await;
    });
    Ok(shown)
}

/// Refuses a text that is not the name of a group.
fn check_group(name: &str) -> Result<(), ApiError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if (1..=GROUP_BYTES_MAX).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    let text =
        format!("the name of a group has 1 to {GROUP_BYTES_MAX} letters, digits, `-`, `_` and `.`");
    Err(ApiError::new(ErrorCode::InvalidRequest, text))
}

struct Preparing {
    source: Arc<Source>,
    entry: Arc<Entry>,
    candidate: Candidate,
    request: StartMigration,
    gang: Arc<Gang>,
    share: Share,
}

impl Preparing {
    async fn run(self, reservation: Reservation) {
        let entry = self.entry.clone();
        let context = self.source.context.clone();
        let about = self.about();
        let source = self.source.clone();
        let state = format!(
            "nothing was moved; {} runs on {}",
            entry.migration().guest,
            context.parts.config.name
        );
        let prepared = self.prepare(reservation).await;
        match prepared {
            Ok((task, session)) => SourceAttempt::new(task, session).run().await,
            Err(mut error) => {
                source.parts.guests.settle_guest(&about.guest);
                source.companions(&about).finished(true).await;
                error.state_of_guest.get_or_insert(state);
                let outcome = failure::outcome(&error);
                entry.end(outcome, Some(error));
                context.archive.keep(&entry);
            }
        }
        // The guest's name is free: its mark may go, if it stays here.
        context.sweeper.wake();
    }

    fn about(&self) -> About {
        About {
            context: self.source.context.clone(),
            guest: self.candidate.guest.name().to_owned(),
            host: self.candidate.host.name.clone(),
            shown: Some((
                self.entry.clone(),
                Generation(self.candidate.generation.0 + 1),
            )),
        }
    }

    async fn prepare(self, reservation: Reservation) -> Result<(Task, Session), ApiError> {
        let qemu =
            |error: &dyn std::fmt::Display| ApiError::new(ErrorCode::Qemu, error.to_string());
        let Candidate {
            guest,
            host,
            generation,
        } = &self.candidate;
        end_before_move(&self.source, guest.name()).await?;
        let guests = &self.source.parts.guests;
        let lease = guests.lease(guest, COMMAND_TIMEOUT).await;
        let lease = lease.map_err(|error| qemu(&error))?;
        let qmp = lease.qmp();
        let vcpus = RateMeter::vcpus(qmp, guest.pid()).await;
        let rate_meter = vcpus.and_then(RateMeter::begin);
        let mut companions = self.source.companions(&self.about());
        companions.check(guest, qmp).await?;
        let asked = self.request.disks;
        let examining = checks::examine(&self.source, guest, qmp, asked);
        let connecting = async {
            let connecting = self.source.context.endpoint.connect(&host.name);
            let control = self.unless_cancelled(connecting).await?;
            control.map_err(|error| failure::connect(&host.name, &error))
        };
        let (examined, control) = tokio::try_join!(examining, connecting)?;
        let Examined {
            machine,
            described,
            paused,
            mut known,
            disks,
            reasons,
        } = examined;
        if let Some(reason) = reasons.into_iter().next() {
            return Err(reason.error);
        }
        let limit = self.share.of(self.request.bandwidth_bps);
        known.limit(
            self.source.context.link_rate(&host.name),
            limit,
            control.rtt(),
        );
        tracing::debug!(guest = guest.name(), ?known, "what disks are chosen by");
        let mut held = block_in_place(|| files::hold(&self.source, guest))?;
        let query = Query {
            guest: described.clone(),
            machine: machine.clone(),
        };
        let asking = (query, &*disks, &known);
        let (lacking, follows) = self.ask(&control, asking, &mut held).await?;
        let required = self.request.require_arbiter;
        let version = control.peer().version;
        let of = (guest.name(), *generation);
        let Agreed {
            store: arbiter,
            note,
        } = agree(&self.source, of, version, required).await?;
        self.entry.report_with(|report| {
            report.arbiter = note;
            report.arbitrated = arbiter.is_some();
        });
        let managed = self.begin_at_manager(guest, &lease).await?;
        self.unless_cancelled(companions.prepare(guest)).await??;
        let mut outbound = SourceQemu::attach(guests.clone(), guest.clone(), lease)
            .await
            .map_err(crate::source::qemu::SourceQemuError::into_api)?;
        outbound.measures_rate(rate_meter);
        let regions = (outbound.regions(), lacking.as_slice());
        let mut local =
            local_disks::local(&self.source, guest.description(), asked, &known, regions)?;
        let bases = local
            .iter_mut()
            .filter_map(|disk| disk.offered.base.as_mut());
        bases.for_each(|base| base.lazily = self.request.bases == BaseChoice::Lazy);
        outbound.take_along(local);
        let may_follow = self.is_auto() && follows;
        outbound.moves_by(of_memory(self.request.strategy), may_follow);
        let memory_follows = outbound.follows() != Pulled::Nothing;
        if self.request.keep_memory && memory_follows {
            outbound.keeps_memory();
        }
        let encoding = self.encoding(&outbound);
        let rate = self.source.context.link_rate(&host.name);
        let sampled_disks = block_in_place(|| sample::disks(outbound.disks(), encoding, rate));
        let mut regions = outbound.regions().to_vec();
        regions.extend(outbound.disks().iter().map(|disk| disk.spec.clone()));
        let mut offer = Offer {
            migration: self.entry.id(),
            attempt: Attempt(1),
            generation: *generation,
            guest: described,
            machine,
            regions,
            digest_key: self.gang.key(),
            paused,
            verify: self.request.verify,
            patience_ms: u32::try_from(self.request.patience_ms).unwrap_or(u32::MAX),
            early_release: self.request.early_release,
        };
        let mut journal = Journal::open(&self.source.journals, offer.migration)
            .map_err(|error| failure::internal(&error.to_string()))?;
        let began = Record::Began {
            migration: offer.migration,
            attempt: offer.attempt,
            side: handover::Side::Source,
            guest: offer.guest.name.clone(),
            generation: offer.generation,
            peer: host.id,
            peer_name: host.name.clone(),
            paused,
        };
        let write = |journal: &mut Journal, record: &Record| {
            block_in_place(|| fail_point::append(journal, record))
                .map_err(|error| failure::internal(&error.to_string()))
        };
        let incarnation = control.peer().incarnation;
        let peer = incarnation.map(|incarnation| Record::Peer {
            attempt: offer.attempt,
            incarnation,
        });
        let mut records = [began].into_iter().chain(peer);
        if let Err(error) = records.try_for_each(|record| write(&mut journal, &record)) {
            // It may be on disk nevertheless, and no peer has heard of the attempt.
            if let Err(error) = block_in_place(|| journal.remove()) {
                tracing::warn!(%error, "a journal that never began stays until the next start");
            }
            return Err(error);
        }
        let guard = Withdrawal {
            control: Some(control.clone()),
        };
        let qemu = (&mut outbound, &mut companions);
        let begun = self.begin(control, &mut offer, qemu, (held, managed));
        let begun = begun.await;
        let (session, sending, look, keeps) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                match outbound.abort().await {
                    Ok(()) => companions.resumed(outbound.guest(), outbound.qmp()).await,
                    Err(error) => {
                        tracing::error!(%error, "the guest's QEMU could not be set back");
                    }
                }
                self.source.sweeper.wake();
                // The task that continues the attempt may need the control connection to this QEMU.
                drop((outbound, companions));
                let aborted = Record::Aborted {
                    attempt: offer.attempt,
                    reason: crate::channel::short(&error.message),
                };
                if let Err(error) = write(&mut journal, &aborted) {
                    // The recovered source writes it again until it is on disk.
                    tracing::error!(%error, "a record cannot be written");
                }
                RecoveredSource::given_up(&self.source, journal, &self.entry, reservation).await;
                return Err(error);
            }
        };
        guard.keep();
        let known_rate = self.source.context.link(&host.name);
        let terms = Terms {
            attempt: offer.attempt,
            generation: offer.generation,
            early: offer.early_release,
            arbiter: None,
        };
        let ledger = Ledger::new(
            self.source.context.clone(),
            offer.migration,
            &offer.guest.name,
            (&host.name, Some(host.id)),
            terms,
            journal,
        );
        let disks = outbound.disks();
        let downtime = Duration::from_millis(self.request.downtime_ms);
        let core = Core::new(
            Config {
                terms,
                patience: Duration::from_millis(self.request.patience_ms),
                downtime,
                // No time limit with disks: base images, and volumes that are cleared first, may
                // take long. The destination reports if one fails.
                launch_within: disks.is_empty().then_some(OFFER_WITHIN),
                verify: offer.verify,
                drains: memory_follows || disks.iter().any(may_be_left),
                arbiter,
                requires_arbiter: required,
            },
            Duration::ZERO,
        );
        let handover = SourceHandover::new(core, ledger);
        let task = Task {
            source: self.source,
            entry: self.entry,
            offer,
            host: host.name.clone(),
            outbound,
            companions,
            sending,
            handover,
            downtime,
            look,
            sampled_disks,
            keeps,
            may_follow,
            known_rate,
            share: self.share,
            reservation,
        };
        Ok((task, session))
    }

    /// Returns whether the strategy of the memory is chosen during the move.
    fn is_auto(&self) -> bool {
        self.request.strategy == longhaul_api::Strategy::Auto
    }

    /// Asks the destination whether it has the guest's files and accepts the move, before anything
    /// is changed. Returns the read-only images that it lacks, by name, and whether memory may
    /// follow the guest there.
    async fn ask(
        &self,
        control: &Control,
        (query, disks, known): (Query, &[OfferedDisk], &Known),
        held: &mut Held,
    ) -> Result<(Vec<String>, bool), ApiError> {
        let peer = control.peer();
        let mut follows = follows_by(self.request.strategy);
        if follows != Pulled::Nothing && peer.version < VERSION_OF_POSTCOPY {
            let refusal = too_old_to_follow(&peer.host.name, &peer.software);
            if !self.is_auto() {
                return Err(refusal);
            }
            self.moves_by_precopy(&refusal.message);
            follows = Pulled::Nothing;
        }
        // An older destination answers such a question only to those that may plan.
        let is_old = peer.version < VERSION_OF_PORTS;
        let has_ports = query.guest.nics.iter().any(|nic| nic.port.is_some());
        if is_old && held.is_empty() && disks.is_empty() && !has_ports {
            return Ok((Vec::new(), false));
        }
        let asking = (query.clone(), disks, known);
        let mut asked = self.ask_if(control, asking, held, follows).await;
        if let Err(refusal) = &asked
            && self.is_auto()
            && follows != Pulled::Nothing
        {
            let why = refusal.message.clone();
            follows = Pulled::Nothing;
            let asking = (query, disks, known);
            asked = self.ask_if(control, asking, held, follows).await;
            if asked.is_ok() {
                self.moves_by_precopy(&why);
            }
        }
        let lacking = asked?;
        if let (Some(image), DiskChoice::Shared) = (lacking.first(), self.request.disks) {
            let host = &self.candidate.host.name;
            let text = format!("{host} lacks image {image}, and with --disks shared none moves");
            let hint = "leave out --disks shared, or copy the image's file there";
            return Err(ApiError::new(ErrorCode::Refused, text).hint(hint));
        }
        Ok((lacking, follows != Pulled::Nothing))
    }

    /// Reports why memory cannot follow the guest.
    fn moves_by_precopy(&self, why: &str) {
        tracing::info!(guest = self.request.guest, why, "moved by pre-copy");
        self.entry
            .report_with(|report| report.strategy_why = Some(why.to_owned()));
    }

    /// Asks the destination whether it accepts the move if this part of the memory may follow.
    /// Returns the read-only images that it lacks.
    async fn ask_if(
        &self,
        control: &Control,
        (query, disks, known): (Query, &[OfferedDisk], &Known),
        held: &mut Held,
        follows: Pulled,
    ) -> Result<Vec<String>, ApiError> {
        let host = &self.candidate.host.name;
        let question = Question {
            query,
            generation: self.candidate.generation,
            follows,
            arbiter: arbiter::question(&self.source, self.request.require_arbiter),
            managed: files::outlook(&self.source, &self.candidate.guest)?,
        };
        let guest = self.candidate.guest.description();
        let brought =
            |lacking: &[String]| local_disks::brought(&self.source, guest, known, lacking);
        let asking = files::ask(&self.source, control, &question, disks, held, brought);
        let Answered { checks, lacking } = match self.unless_cancelled(asking).await? {
            Ok(asked) => asked,
            Err(AskError::Here(error)) => return Err(error),
            Err(AskError::Talk(error)) => {
                return Err(crate::source::connect::failure(host, &error.into()));
            }
        };
        for check in checks {
            match check.verdict {
                Verdict::Fine => {}
                Verdict::Warning => tracing::warn!(host, "{}", check.text),
                Verdict::Refused => {
                    let error = ApiError::new(ErrorCode::Refused, check.text);
                    return Err(match check.hint {
                        Some(hint) => error.hint(hint),
                        None => error,
                    });
                }
            }
        }
        Ok(lacking)
    }

    /// Begins the guest's departure at the program that manages it, if Longhaul does not. From then
    /// on no other program changes the guest. Returns what the program needs at the destination.
    async fn begin_at_manager(
        &self,
        guest: &Guest,
        lease: &Lease,
    ) -> Result<Option<Managed>, ApiError> {
        let Some(by) = guest.owner().manager() else {
            return Ok(None);
        };
        let begun = self.source.parts.guests.begin(guest, lease).await;
        let Cookie(cookie) = begun.map_err(|error| {
            let text = format!("{by} does not let {} go: {error}", guest.name());
            ApiError::new(ErrorCode::Qemu, text)
        })?;
        Ok(Some(Managed { by, cookie }))
    }

    /// Makes the offer and begins the move: the destination launches its QEMU and takes blocks, and
    /// QEMU at the source tracks writes.
    async fn begin(
        &self,
        control: Control,
        offer: &mut Offer,
        (outbound, companions): (&mut SourceQemu, &mut Companions),
        (held, managed): (Held, Option<Managed>),
    ) -> Result<(Session, Arc<Sending>, watch::Receiver<Look>, bool), ApiError> {
        let host = &self.candidate.host.name;
        let limit = self.share.of(self.request.bandwidth_bps);
        let message = offered(&self.source, offer, outbound, (&held, managed));
        let offered = connect::offer(control, message, offer, (limit, held.reading_time()));
        // The guest's memory is sampled meanwhile, and nothing waits for the result.
        let rate = self.source.context.link_rate(host);
        let look = plan::look(outbound, self.encoding(outbound), rate);
        let offered = self.unless_cancelled(offered).await?;
        let (mut session, keeps) =
            offered.map_err(|error| crate::source::connect::failure(host, &error))?;
        // The destination has compared the files, so they need no locks any more.
        drop(held);
        if let Some(key) = keeps.digest_key {
            offer.digest_key = key;
        }
        let prepared = match outbound.guest().owner().manager() {
            Some(_) => {
                let prepared = connect::prepared(&mut session);
                let prepared = self.unless_cancelled(prepared).await?;
                prepared.map_err(|error| crate::source::connect::failure(host, &error))?
            }
            None => Cookie::default(),
        };
        let version = session.control.peer().version;
        let sending = self.sending(offer, outbound, (&keeps, version))?;
        let slow_at_most = convergence::slow_at_most(&self.request.convergence);
        let before = outbound.next_rate();
        self.entry
            .report_with(|report| report.guest_rates.before = before);
        let watched = companions.started(outbound, &sending, offer.verify).await;
        let starts = async {
            watched?;
            // The destination was told that it runs, and would let it run.
            if !offer.paused && is_paused(outbound.qmp()).await? {
                return Err(SourceQemuError::from(OutgoingError::Paused).into_api());
            }
            let started = outbound.start(slow_at_most, prepared).await;
            started.map_err(SourceQemuError::into_api)
        };
        let started = starts.await;
        if let Err(error) = started {
            withdraw(&mut session, "the source's QEMU cannot begin").await;
            return Err(error);
        }
        Ok((session, sending, look, !keeps.regions.is_empty()))
    }

    /// Creates the engine and the [`Sending`] for it. Nothing is sent yet.
    fn sending(
        &self,
        offer: &Offer,
        outbound: &SourceQemu,
        (keeps, version): (&Keeps, u16),
    ) -> Result<Arc<Sending>, ApiError> {
        let downtime = Duration::from_millis(self.request.downtime_ms);
        let internal = |error: SourceError| failure::internal(&error.to_string());
        let (strategy, may_follow) = outbound.strategy();
        let mut engine = Engine::new(
            strategy,
            outbound.regions(),
            convergence::wish(&self.request.convergence, downtime),
            SWITCH_OVERHEAD,
        )
        .map_err(internal)?;
        if may_follow {
            engine.memory_may_follow();
        }
        local_disks::add(&mut engine, outbound.disks()).map_err(internal)?;
        let encoding = self.request.encoding.or(&self.source.parts.config.encoding);
        let references = encoding.references.unwrap_or(true);
        engine.use_references(references);
        if references {
            let mut kept = keeps.regions.iter();
            kept.try_for_each(|region| engine.kept(*region))
                .map_err(internal)?;
            if version >= VERSION_OF_RUNS {
                engine.use_runs();
            }
        }
        engine.use_disk_references(encoding.disk_references.unwrap_or(true));
        if references {
            self.gang.join(offer.migration, &mut engine);
        }
        let encoding = self.encoding(outbound);
        let key = DigestKey(offer.digest_key);
        let content = outbound.content();
        let of = (offer.migration, key);
        let checked = Checked::of(outbound.disks().iter().map(|disk| &disk.spec));
        Ok(Sending::new(engine, of, content, encoding, checked))
    }

    /// Returns the encoding of the guest's memory.
    fn encoding(&self, outbound: &SourceQemu) -> Encoding {
        let chosen = self.request.encoding.or(&self.source.parts.config.encoding);
        let regions = outbound.regions().iter();
        let memory_bytes = regions.map(|region| region.blocks * BLOCK_SIZE as u64);
        Encoding::new(&chosen, memory_bytes.sum())
    }

    /// Waits for an answer of another host, unless the migration is cancelled.
    async fn unless_cancelled<T>(&self, future: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut cancelled = self.entry.cancelled();
        tokio::select! {
            done = future => Ok(done),
            Ok(why) = cancelled.wait_for(Option::is_some) => {
                Err(failure::cancelled(why.as_deref().unwrap_or_default()))
            }
        }
    }
}

/// Returns the message that makes the offer.
fn offered(
    context: &Context,
    offer: &Offer,
    outbound: &SourceQemu,
    (held, managed): (&Held, Option<Managed>),
) -> ToDestination {
    let mut disks: Vec<_> = outbound
        .disks()
        .iter()
        .map(|disk| disk.offered.clone())
        .collect();
    block_in_place(|| {
        crate::disks::base_images::say_what_is_hot(&context.parts.config.state, &mut disks)
    });
    let mut offer = offer.clone();
    let ports = port::take(&mut offer.guest);
    let memory = outbound.follows();
    if !ports.is_empty() || memory != Pulled::Nothing || managed.is_some() {
        let files = held.claims().to_vec();
        let offer = DisksOffer { offer, disks };
        let offered = FilesOffer { offer, files };
        return ToDestination::OfferPorts(Box::new(PortsOffer {
            offered,
            ports,
            memory,
            managed,
        }));
    }
    if !held.is_empty() {
        let files = held.claims().to_vec();
        let offer = DisksOffer { offer, disks };
        return ToDestination::OfferFiles(Box::new(FilesOffer { offer, files }));
    }
    match disks.is_empty() {
        true => ToDestination::Offer(Box::new(offer)),
        false => ToDestination::OfferDisks(Box::new(DisksOffer { offer, disks })),
    }
}

/// Closes the connection if preparing is dropped half-way, so that the destination hears that the
/// migration is given up.
struct Withdrawal {
    control: Option<Control>,
}

impl Withdrawal {
    fn keep(mut self) {
        self.control = None;
    }
}

impl Drop for Withdrawal {
    fn drop(&mut self) {
        if let Some(control) = &self.control {
            control.close(CloseCode::Done, "the migration was given up");
        }
    }
}

/// Withdraws the offer, and waits for the destination's confirmation.
async fn withdraw(session: &mut Session, reason: &str) {
    let cancel = ToDestination::Cancel {
        reason: crate::channel::short(reason),
    };
    let withdrawn = async {
        session.sender.send(&cancel)?;
        loop {
            if let ToSource::Aborted { .. } = session.receiver.recv().await? {
                return Ok::<(), crate::channel::TalkError>(());
            }
        }
    };
    match timeout(WITHDRAW_WITHIN, withdrawn).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the destination went first"),
        Err(_) => tracing::warn!("the destination does not confirm that the offer is withdrawn"),
    }
}
