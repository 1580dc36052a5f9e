//! Implements `disk-front`: the processes of a disk export, which agents start. They have threads
//! and no runtime, so that only their own work can stall them.

use crate::cli::args::{DiskFrontArgs, FrontPart};
use clap::ValueEnum;
use longhaul_image::ImageNotice;
use longhaul_image::front::base;
use longhaul_storage::front::{
    FrontFolder, Policy, Programs, Supervisor, SupervisorError, arriving, pass_through, telling,
    tracking,
};
use longhaul_storage::nbd::Notice;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// This program, even if its file was replaced since.
const PROGRAM: &str = "/proc/self/exe";

/// Runs one part until it ends.
pub(crate) fn run(args: &DiskFrontArgs) -> ExitCode {
    let folder = FrontFolder::open(&args.folder);
    let notice = |notice: Notice| tracing::warn!("{notice}");
    let error = match args.part {
        FrontPart::Supervise => supervise(&args.folder, folder).map_err(|e| e.to_string()),
        FrontPart::Tell => telling(&folder, notice).map_err(|e| e.to_string()),
        FrontPart::Track => tracking(&folder, notice).map_err(|e| e.to_string()),
        FrontPart::Arrive => arriving(&folder, notice).map_err(|e| e.to_string()),
        FrontPart::Base => base(&folder, notice, image_notice).map_err(|e| e.to_string()),
        FrontPart::PassThrough => pass_through(&folder, notice).map_err(|e| e.to_string()),
    };
    match error {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(folder = %args.folder.display(), "{error}");
            ExitCode::FAILURE
        }
    }
}

/// Logs an event of a base image in the log of its disk export.
fn image_notice(notice: &ImageNotice) {
    match notice {
        ImageNotice::Away { reason } => tracing::warn!("what is missing waits: {reason}"),
        ImageNotice::Back => tracing::info!("the repository answers again"),
        ImageNotice::Failed { offset, reason } => {
            tracing::error!("the stripe at byte {offset} cannot be had: {reason}");
        }
        ImageNotice::NotKept { reason } => tracing::error!("what comes cannot be kept: {reason}"),
    }
}

fn supervise(path: &Path, folder: FrontFolder) -> Result<(), SupervisorError> {
    let program = |part: FrontPart| -> Box<dyn Fn() -> Command> {
        let path = path.to_owned();
        Box::new(move || command(part, &path))
    };
    // A part that alone knows the missing blocks is restarted each time it ends.
    let alone = |server: Box<dyn Fn() -> Command>| Programs {
        server,
        fallback: None,
    };
    let spec = folder.spec()?;
    let programs = match spec.fetched {
        Some(fetched) => {
            let server = program(FrontPart::Base);
            alone(Box::new(move || {
                let mut command = server();
                command.envs(&fetched.environment);
                command
            }))
        }
        None if spec.arriving => alone(program(FrontPart::Arrive)),
        None => Programs {
            server: program(match spec.tracked {
                true => FrontPart::Track,
                false => FrontPart::Tell,
            }),
            fallback: Some(program(FrontPart::PassThrough)),
        },
    };
    let report = |event| tracing::info!("{event}");
    Supervisor::start(folder, programs, Policy::default(), report)?.run()
}

fn command(part: FrontPart, folder: &PathBuf) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("disk-front");
    if let Some(part) = part.to_possible_value() {
        command.arg(part.get_name());
    }
    command.arg(folder).stderr(Stdio::inherit());
    command
}
